// Finds out whether weights are blocks, and packs them.
#include "blocks.h"

#include <cmath>

namespace octavo {
namespace {

struct Block {
  float scale, least;
  uint8_t codes[kBlockInputs];
};

bool is_half(float value) { return widen_float16(round_float16(value)) == value; }

// Whether every weight is exactly code * scale + least, with codes up to `most`.
bool take(const float* weights, float scale, float least, int32_t most, Block& block) {
  if (!is_half(least)) return false;
  float inverse = scale != 0 ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < kBlockInputs; ++i) {
    float code = std::nearbyint((weights[i] - least) * inverse);
    if (!(code >= 0 && code <= most) || std::fma(code, scale, least) != weights[i]) return false;
    block.codes[i] = static_cast<uint8_t>(code);
  }
  block.scale = scale;
  block.least = least;
  return true;
}

// The smallest and the largest weight are `steps` scales apart, and the first of them is code `first`. Quantizers
// nearly always use the whole range, which is looked at first. A scale may be negative (Q4_0): the other way round.
bool find_4_bits(const float* weights, Block& block) {
  float low = weights[0], high = weights[0];
  for (int64_t i = 1; i < kBlockInputs; ++i) {
    low = std::min(low, weights[i]);
    high = std::max(high, weights[i]);
  }
  if (low == high) return take(weights, 0.0f, low, 0, block);
  for (int32_t steps = 15; steps > 0; --steps) {
    float scale = widen_float16(round_float16((high - low) / static_cast<float>(steps)));
    for (int32_t first = 0; first + steps <= 15; ++first) {
      float before = static_cast<float>(first) * scale;
      if (take(weights, scale, low - before, 15, block) || take(weights, -scale, high + before, 15, block)) return true;
    }
  }
  return false;
}

bool find_8_bits(const float* weights, Block& block) {
  float largest = 0;
  for (int64_t i = 0; i < kBlockInputs; ++i) largest = std::max(largest, std::fabs(weights[i]));
  float scale = widen_float16(round_float16(largest / 127.0f));
  float inverse = scale != 0 ? 1.0f / scale : 0.0f;
  for (int64_t i = 0; i < kBlockInputs; ++i) {
    float code = std::nearbyint(weights[i] * inverse);
    if (!(std::fabs(code) <= 127) || code * scale != weights[i]) return false;
    block.codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code) + 128);
  }
  block.scale = scale;
  block.least = -128.0f * scale;
  return true;
}

bool find(const float* weights, int32_t bits, Block& block) {
  return bits == 4 ? find_4_bits(weights, block) : find_8_bits(weights, block);
}

bool all_are(const float* weights, int64_t count, int32_t bits) {
  Block block;
  for (int64_t at = 0; at < count; at += kBlockInputs) {
    if (!find(weights + at, bits, block)) return false;
  }
  return true;
}

void put_half(char* to, float value) {
  uint16_t bits = round_float16(value);
  std::memcpy(to, &bits, 2);
}

}  // namespace

int32_t find_block_bits(const float* weights, int64_t num_outputs, int64_t num_inputs) {
  if (num_inputs % kBlockInputs) return 0;
  for (int32_t bits : {4, 8}) {
    if (all_are(weights, num_outputs * num_inputs, bits)) return bits;
  }
  return 0;
}

void pack_blocks(const Linear& linear, const float* weights) {
  int64_t num_blocks = linear.num_inputs / kBlockInputs, bytes = block_bytes(linear.block_bits);
  for (int64_t output = 0; output < linear.panels() * kPanel; ++output) {
    int64_t panel = output / kPanel, lane = output % kPanel, source = source_row(linear, output);
    if (source >= linear.num_outputs) continue;  // zeros: weights of 0
    for (int64_t nth = 0; nth < num_blocks; ++nth) {
      Block block;
      find(weights + source * linear.num_inputs + nth * kBlockInputs, linear.block_bits, block);
      char* to = linear.weights + (panel * num_blocks + nth) * bytes;
      put_half(to + lane * 2, block.scale);
      if (linear.block_bits == 4) put_half(to + (kPanel + lane) * 2, block.least);
      auto* codes = reinterpret_cast<uint8_t*>(to + (linear.block_bits == 4 ? 4 : 2) * kPanel);
      int64_t vectors = linear.block_bits == 4 ? 4 : 8;
      for (int64_t i = 0; i < kBlockInputs; ++i) {
        int64_t vector = i / 4 % vectors;
        uint8_t& byte = codes[((lane / kLanes * vectors + vector) * kLanes + lane % kLanes) * 4 + i % 4];
        byte = static_cast<uint8_t>(byte | block.codes[i] << (i / 4 >= vectors ? 4 : 0));
      }
    }
  }
}

}  // namespace octavo
