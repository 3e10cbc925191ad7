// Packing and products of linear layers. A micro-kernel computes kMaxRows tokens by one panel in registers.
#include "linear.h"

#include <cmath>
#include <cstdlib>
#include <new>

#include "blocks.h"

namespace octavo {
namespace {

typedef Words WordsUnaligned __attribute__((aligned(4)));

template <typename T>
T* allocate(int64_t count) {
  int64_t bytes = std::max<int64_t>(64, (count * sizeof(T) + 63) / 64 * 64);
  void* memory = std::aligned_alloc(64, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
  return static_cast<T*>(memory);
}

// ---------------------------------------------------------------------------------------------- products of integers

#if defined(OCTAVO_EMULATE_VNNI)
typedef Words Weights8;
inline Weights8 load_weights(const int8_t* from) { return *reinterpret_cast<const WordsUnaligned*>(from); }
inline Words dot(Words sum, Weights8 weights, int32_t codes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      sum[lane] += static_cast<uint8_t>(weights[lane] >> (8 * i)) * static_cast<int8_t>(codes >> (8 * i));
    }
  }
  return sum;
}
#elif defined(__AVX512F__) && defined(__AVX512VNNI__)
typedef __m512i Weights8;
inline Weights8 load_weights(const int8_t* from) { return _mm512_loadu_si512(from); }
inline Words dot(Words sum, Weights8 weights, int32_t codes) {
  return (Words)_mm512_dpbusd_epi32((__m512i)sum, weights, _mm512_set1_epi32(codes));
}
#elif !defined(__AVX512F__) && defined(__AVXVNNI__)
typedef __m256i Weights8;
inline Weights8 load_weights(const int8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline Words dot(Words sum, Weights8 weights, int32_t codes) {
  return (Words)_mm256_dpbusd_avx_epi32((__m256i)sum, weights, _mm256_set1_epi32(codes));
}
#elif defined(__AVX512BW__)
typedef __m512i Weights8;
inline Weights8 load_weights(const int8_t* from) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
}
inline Words dot(Words sum, Weights8 weights, int32_t codes) {
  return sum + (Words)_mm512_madd_epi16(weights, _mm512_set1_epi32(codes));
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
typedef __m256i Weights8;
inline Weights8 load_weights(const int8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
}
inline Words dot(Words sum, Weights8 weights, int32_t codes) {
  return sum + (Words)_mm256_madd_epi16(weights, _mm256_set1_epi32(codes));
}
#else
// Words of pairs, by plain arithmetic.
struct Weights8 {
  Words low, high;
};
inline Weights8 load_weights(const int8_t* from) {
  Weights8 weights;
  for (int lane = 0; lane < kLanes; ++lane) {
    weights.low[lane] = from[2 * lane];
    weights.high[lane] = from[2 * lane + 1];
  }
  return weights;
}
inline Words dot(Words sum, Weights8 weights, int32_t codes) {
  return sum + weights.low * static_cast<int16_t>(codes) + weights.high * (codes >> 16);
}
#endif

// ------------------------------------------------------------------------------------------------------ micro-kernels

// Float sums lie in memory: registers are for the integers.
template <int kRows>
void panel_int8(const Linear& linear, const Rows2d& in, int64_t token, int64_t panel, const Product& product) {
  int64_t groups = (linear.num_inputs + kGroup - 1) / kGroup;
  const int8_t* weights = reinterpret_cast<const int8_t*>(linear.weights) + panel * groups * kGroup * kPanel;
  const Code* codes = in.codes + token * in.stride;
  Floats totals[kRows][2] = {};
  for (int64_t begin = 0, nth = 0; begin < groups; begin += kScaled / kGroup, ++nth) {
    const float* scales = in.scales + token * in.scale_stride + nth;
    const int32_t* offsets = in.offsets + token * in.scale_stride + nth;
    int64_t end = std::min(begin + kScaled / kGroup, groups);
    asm volatile("" : : "r"(totals) : "memory");  // keeps them out of the registers
    Words sums[kRows][2];
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      sums[row][0] = sums[row][1] = Words{} + (kWeightZero ? offsets[row * in.scale_stride] : 0);
    }
    for (int64_t group = begin; group < end; ++group, weights += kGroup * kPanel) {
      Weights8 first = load_weights(weights), second = load_weights(weights + kGroup * kLanes);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        int32_t pair;
        std::memcpy(&pair, codes + row * in.stride + group * kGroup, 4);
        sums[row][0] = dot(sums[row][0], first, pair);
        sums[row][1] = dot(sums[row][1], second, pair);
      }
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      float scale = scales[row * in.scale_stride];
      totals[row][0] += __builtin_convertvector(sums[row][0], Floats) * scale;
      totals[row][1] += __builtin_convertvector(sums[row][1], Floats) * scale;
    }
  }
  Floats scale[2], bias[2] = {};
  for (int half = 0; half < 2; ++half) {
    scale[half] = load(linear.scales + panel * kPanel + half * kLanes);
    if (linear.bias) bias[half] = load(linear.bias + panel * kPanel + half * kLanes);
  }
  for (int row = 0; row < kRows; ++row) {
    finish(product, token + row, panel, totals[row][0] * scale[0] + bias[0], totals[row][1] * scale[1] + bias[1]);
  }
}

template <int kRows, int32_t kFormat>
void panel_floats(const Linear& linear, const Rows2d& in, int64_t token, int64_t panel, const Product& product) {
  constexpr int64_t kBytes = kFormat == kFloat32 ? 4 : 2;
  const char* weights = linear.weights + panel * linear.num_inputs * kPanel * kBytes;
  const float* inputs = in.floats + token * in.stride;
  Floats sums[kRows][2] = {};
  for (int64_t k = 0; k < linear.num_inputs; ++k, weights += kPanel * kBytes) {
    Floats first, second;
    if constexpr (kFormat == kBfloat16) {
      first = load_bfloat16(weights);
      second = load_bfloat16(weights + kLanes * 2);
    } else if constexpr (kFormat == kFloat16) {
      first = load_float16(weights);
      second = load_float16(weights + kLanes * 2);
    } else {
      first = load(reinterpret_cast<const float*>(weights));
      second = load(reinterpret_cast<const float*>(weights) + kLanes);
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
      float input = inputs[row * in.stride + k];
      sums[row][0] += first * input;
      sums[row][1] += second * input;
    }
  }
  for (int row = 0; row < kRows; ++row) {
    if (linear.bias) {
      sums[row][0] += load(linear.bias + panel * kPanel);
      sums[row][1] += load(linear.bias + panel * kPanel + kLanes);
    }
    finish(product, token + row, panel, sums[row][0], sums[row][1]);
  }
}

template <int kRows>
void panel_rows(const Linear& linear, const Rows2d& in, int64_t token, int64_t count, int64_t panel,
                const Product& product) {
  if constexpr (kRows > 0) {
    if (count != kRows) return panel_rows<kRows - 1>(linear, in, token, count, panel, product);
    if (linear.format == kInt8) return panel_int8<kRows>(linear, in, token, panel, product);
    if (linear.format == kBfloat16) return panel_floats<kRows, kBfloat16>(linear, in, token, panel, product);
    if (linear.format == kFloat16) return panel_floats<kRows, kFloat16>(linear, in, token, panel, product);
    panel_floats<kRows, kFloat32>(linear, in, token, panel, product);
  }
}

}  // namespace

void multiply(const Linear& linear, const Rows2d& in, int64_t num_tokens, const Product& product, int num_threads,
              std::atomic<int64_t>& next) {
  int64_t rows = linear.block_bits ? kUnpackedRows : kRowBlock;
  int64_t panels = linear.panels(), blocks = (num_tokens + rows - 1) / rows;
  // Units of several panels, enough of them that no thread waits long for another.
  int64_t width = std::max<int64_t>(1, panels * blocks / (num_threads * 16));
  int64_t units_per_block = (panels + width - 1) / width;
  for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units_per_block * blocks;) {
    int64_t begin = unit / units_per_block * rows, end = std::min(begin + rows, num_tokens);
    int64_t first = unit % units_per_block * width, last = std::min(first + width, panels);
    int64_t tiles = (end - begin + kMaxRows - 1) / kMaxRows;  // of about equal size: 8 tokens are 4 and 4
    if (linear.block_bits) {
      multiply_blocks(linear, in, begin, end, first, last, product);
      continue;
    }
    for (int64_t panel = first; panel < last; ++panel) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        int64_t from = begin + (end - begin) * tile / tiles, to = begin + (end - begin) * (tile + 1) / tiles;
        panel_rows<kMaxRows>(linear, in, from, to - from, panel, product);
      }
    }
  }
}

namespace {

// Codes of one row, and of each `group` of them their scale and their sum, which `note` is told.
template <typename Stored, typename Note>
void quantize(const float* row, int64_t size, int64_t group, Stored* codes, float* scales, Note&& note) {
  for (int64_t begin = 0; begin < size; begin += group, ++scales) {
    int64_t end = std::min(begin + group, size);
    Floats highest{}, poison{};
    for (int64_t at = begin; at < end; at += kLanes) {
      Floats x = load(row + at);
      highest = maximum(x < 0.0f ? -x : x, highest);
      poison += x * 0.0f;  // NaN and infinity have no code: they make the scale NaN
    }
    float largest = max_lanes(highest), inverse = largest > 0 ? 127.0f / largest : 0.0f;
    Words total{};
    for (int64_t at = begin; at < end; at += kLanes) {
      Floats shifted = load(row + at) * inverse + 12582912.0f;  // 1.5 * 2^23: to the nearest integer, ties to even
      Words whole = reinterpret_cast<Words>(shifted) - 0x4B400000;
      whole = whole > 127 ? Words{} + 127 : whole;
      whole = whole < -127 ? Words{} - 127 : whole;
      total += whole;
      store_codes(codes + at, whole);
    }
    *scales = largest / 127.0f + sum_lanes(poison);
    note(begin / group, static_cast<int32_t>(sum_lanes(__builtin_convertvector(total, Floats))));  // exact: < 2^24
  }
}

}  // namespace

void quantize_row(const Linear& linear, const float* row, int64_t token, const Rows2d& to) {
  float* scales = to.scales + token * to.scale_stride;
  int32_t* offsets = to.offsets + token * to.scale_stride;
  auto note_input = [&](int64_t nth, int32_t sum) { to.sums[token * to.scale_stride + nth] = sum * scales[nth]; };
  if (linear.block_bits == 4) {
    auto* codes = reinterpret_cast<int8_t*>(to.codes) + token * to.stride;
    return quantize(row, linear.num_inputs, kBlockInputs, codes, scales, note_input);
  }
  if (linear.block_bits == 8) {
    return quantize(row, linear.num_inputs, kBlockInputs, to.codes + token * to.stride, scales, note_input);
  }
  quantize(row, padded(linear.num_inputs), kScaled, to.codes + token * to.stride, scales,
           [&](int64_t nth, int32_t sum) { offsets[nth] = -kWeightZero * sum; });
}

// ------------------------------------------------------------------------------------------------------------ packing

namespace {

// One row of dense weights into its lane.
void pack_output(const Linear& linear, int64_t output, const float* row) {
  int64_t panel = output / kPanel, lane = output % kPanel, num_inputs = linear.num_inputs;
  int32_t format = linear.format;
  if (format != kInt8) {
    char* to = linear.weights + panel * num_inputs * kPanel * format_bytes(format);
    for (int64_t k = 0; k < num_inputs; ++k) narrow(to + (k * kPanel + lane) * format_bytes(format), row[k], format);
    return;
  }
  float largest = 0;
  for (int64_t k = 0; k < num_inputs; ++k) largest = std::max(largest, std::fabs(row[k]));
  linear.scales[output] = largest / 127.0f;
  float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  int64_t groups = (num_inputs + kGroup - 1) / kGroup;
  auto* to = reinterpret_cast<int8_t*>(linear.weights) + panel * groups * kGroup * kPanel;
  for (int64_t k = 0; k < num_inputs; ++k) {
    auto code = static_cast<int32_t>(std::nearbyint(row[k] * inverse));
    to[(k / kGroup * kPanel + lane) * kGroup + k % kGroup] = static_cast<int8_t>(code + kWeightZero);
  }
}

}  // namespace

Linear* pack_linear(const float* weights, const float* bias, int64_t num_outputs, int64_t num_inputs, int32_t format,
                    bool gated) {
  auto* linear = new Linear{num_outputs, num_inputs, format, gated, 0, 0, nullptr, nullptr, nullptr};
  if (format == kFloat32 || format == kInt8) linear->block_bits = find_block_bits(weights, num_outputs, num_inputs);
  int64_t padded_outputs = linear->panels() * kPanel;
  linear->weights = allocate<char>(weights_bytes(*linear));
  linear->scales = format == kInt8 && !linear->block_bits ? allocate<float>(padded_outputs) : nullptr;
  linear->bias = bias ? allocate<float>(padded_outputs) : nullptr;
  for (int64_t output = 0; output < padded_outputs && bias; ++output) {
    int64_t source = source_row(*linear, output);
    if (source < num_outputs) linear->bias[output] = bias[source];
  }
  if (linear->block_bits) {
    pack_blocks(*linear, weights);
    return linear;
  }
  for (int64_t output = 0; output < padded_outputs; ++output) {
    int64_t source = source_row(*linear, output);
    if (source < num_outputs) pack_output(*linear, output, weights + source * num_inputs);
  }
  return linear;
}

int64_t weights_bytes(const Linear& linear) {
  if (linear.block_bits) return linear.panels() * linear.num_inputs / kBlockInputs * block_bytes(linear.block_bits);
  int64_t groups = (linear.num_inputs + kGroup - 1) / kGroup;
  int64_t per_output = linear.format == kInt8 ? groups * kGroup : linear.num_inputs * format_bytes(linear.format);
  return linear.panels() * kPanel * per_output;
}

void free_linear(Linear* linear) {
  if (linear == nullptr) return;
  std::free(linear->weights);
  std::free(linear->scales);
  std::free(linear->bias);
  delete linear;
}

}  // namespace octavo
