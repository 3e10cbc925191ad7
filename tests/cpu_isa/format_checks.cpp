// Every bit pattern of the 16-bit formats and of int8 as the kernels' vectors load it, and numbers as they store it.
#include <cmath>
#include <cstring>

#include "checks.h"
#include "reference.h"
#include "simd.h"

namespace checks {
namespace {

bool is_same(float one, float other) { return (one != one && other != other) || !std::memcmp(&one, &other, 4); }

template <typename Load>
void check_loads(const std::string& name, int format, Load&& load) {
  bool by_vectors = true, alone = true;
  for (int32_t first = 0; first < 65536; first += octavo::kLanes) {
    uint16_t patterns[octavo::kLanes];
    for (int lane = 0; lane < octavo::kLanes; ++lane) patterns[lane] = static_cast<uint16_t>(first + lane);
    float loaded[octavo::kLanes];
    octavo::store(loaded, load(patterns));
    for (int lane = 0; lane < octavo::kLanes; ++lane) {
      float right = reference::widened(patterns[lane], format);
      by_vectors &= is_same(loaded[lane], right);
      alone &= is_same(octavo::widen(reinterpret_cast<const char*>(patterns + lane), format), right);
    }
  }
  report_same(name + ": all patterns, by vectors", by_vectors);
  report_same(name + ": all patterns, one by one", alone);
}

// Also numbers between two patterns, small and large ones.
void check_stores() {
  Random random(1);
  bool bfloat16 = true, float16 = true;
  for (int i = 0; i < 20000; ++i) {
    float value = std::ldexp(random.number(), static_cast<int>(random.below(60)) - 40);
    if (i % 4 == 0) value = std::ldexp(static_cast<float>(random.below(8192) - 4096), static_cast<int>(random.below(40)) - 30);
    bfloat16 &= octavo::round_bfloat16(value) == reference::bfloat16_bits(value);
    float16 &= octavo::round_float16(value) == reference::float16_bits(value);
  }
  report_same("bfloat16: rounding", bfloat16);
  report_same("float16: rounding", float16);
}

}  // namespace

void check_formats() {
  check_loads("bfloat16", reference::kBfloat16, octavo::load_bfloat16);
  check_loads("float16", reference::kFloat16, octavo::load_float16);
  check_stores();
  bool int8 = true;
  for (int first = -128; first < 128; first += octavo::kLanes) {
    int8_t codes[octavo::kLanes];
    for (int lane = 0; lane < octavo::kLanes; ++lane) codes[lane] = static_cast<int8_t>(first + lane);
    float loaded[octavo::kLanes];
    octavo::store(loaded, octavo::load_int8(codes));
    for (int lane = 0; lane < octavo::kLanes; ++lane) int8 &= loaded[lane] == static_cast<float>(codes[lane]);
  }
  report_same("int8: all codes", int8);
}

}  // namespace checks
