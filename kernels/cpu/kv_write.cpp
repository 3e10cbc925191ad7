// Writes a token's keys or values into its block, in the block's number format.
//
// Codes and scales of int8 are those of executor/kv_codes.py, to the bit: products are rounded before they become codes.
#include <cmath>
#include <cstring>

#include "attention.h"
#include "simd.h"

namespace octavo {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: a sum with it has the nearest integer in its low bits
constexpr int32_t kShiftedZero = 0x4B400000;

// x * inverse as a code, ties to even. Whatever is no number becomes some code: the scale says that there is none.
template <typename Float>
inline Float shifted_code(Float x, float inverse) {
  Float scaled = x * inverse;
  scaled = scaled > kLargestCode ? Float{} + kLargestCode : scaled;  // between, so that nothing is contracted
  scaled = scaled < -kLargestCode ? Float{} - kLargestCode : scaled;
  return scaled + kShift;
}

inline int8_t code_of(float shifted) {
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return static_cast<int8_t>(bits - kShiftedZero);
}

// Codes of one head into `to`; returns their scale. NaN and infinity have no code: they make the scale NaN.
float write_codes(const float* from, int64_t size, char* to, int64_t element_stride) {
  int64_t whole = size / kLanes * kLanes;
  Floats highest{}, poison{};
  for (int64_t at = 0; at < whole; at += kLanes) {
    Floats x = load(from + at);
    highest = maximum(x < 0.0f ? -x : x, highest);
    poison += x * 0.0f;
  }
  float largest = max_lanes(highest), broken = sum_lanes(poison);
  for (int64_t at = whole; at < size; ++at) {
    largest = std::fabs(from[at]) > largest ? std::fabs(from[at]) : largest;
    broken += from[at] * 0.0f;
  }
  float inverse = largest > 0 ? kLargestCode / largest : 0.0f;
  int64_t done = 0;
  if (element_stride == 1) {
    for (; done < whole; done += kLanes) {
      Words words = reinterpret_cast<Words>(shifted_code(load(from + done), inverse)) - kShiftedZero;
      store_codes(reinterpret_cast<int8_t*>(to + done), words);
    }
  }
  for (; done < size; ++done) to[done * element_stride] = code_of(shifted_code(from[done], inverse));
  return largest / kLargestCode + broken;
}

}  // namespace

void write_token(const KvPlane& plane, int64_t num_kv_heads, int64_t block, int64_t offset, const float* heads,
                 int64_t head_stride) {
  char* base = plane.data + block * plane.block_stride + offset * plane.token_stride;
  char* scales = plane.scales + block * plane.scale_block_stride + offset * plane.scale_token_stride;
  for (int64_t head = 0; head < num_kv_heads; ++head) {
    const float* from = heads + head * head_stride;
    char* to = base + head * plane.head_stride;
    if (plane.format == kInt8) {
      float scale = write_codes(from, plane.head_dim, to, plane.element_stride);
      std::memcpy(scales + head * plane.scale_head_stride, &scale, sizeof(scale));
    } else if (plane.format == kFloat32 && plane.element_stride == 4) {
      std::memcpy(to, from, plane.head_dim * 4);
    } else {
      for (int64_t i = 0; i < plane.head_dim; ++i) narrow(to + i * plane.element_stride, from[i], plane.format);
    }
  }
}

}  // namespace octavo
