// Linear layers: weights packed once for the width of this processor's vectors, and a team's share of one product.
//
// Dense weights are multiplied in float32. Int8 weights, with one scale per output, meet int8 codes of the input with
// one scale per token and kScaled inputs; sums of their products are exact 32-bit integers, added up in float32.
// Weights that are blocks (blocks.h) are stored as such, for both kinds of arithmetic. In every format an output's
// arithmetic is one chain over k, whatever the number of tokens: its bits do not depend on the batch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "simd.h"

namespace octavo {

// Outputs of one panel of packed weights.
constexpr int64_t kPanel = 2 * kLanes;

// Tokens by one panel that a micro-kernel computes in registers, and those that meet a panel while it is in the first
// cache.
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;
constexpr int64_t kRowBlock = 8 * kMaxRows;

// Tokens that meet a panel of blocks each time that it is unpacked: a step's 128 tokens of prompts in one go.
constexpr int64_t kUnpackedRows = 132;

#if (defined(__AVX512F__) && defined(__AVX512VNNI__)) || (!defined(__AVX512F__) && defined(__AVXVNNI__)) || \
    defined(OCTAVO_EMULATE_VNNI)
// Products of four bytes at once, of which one must be unsigned: weights are stored plus kWeightZero, and the sums begin
// at what that adds.
constexpr int kGroup = 4;
typedef int8_t Code;
constexpr int kWeightZero = 128;
#else
// Products of two 16-bit numbers at once: exact, where bytes by bytes would saturate.
constexpr int kGroup = 2;
typedef int16_t Code;
constexpr int kWeightZero = 0;
#endif

// Inputs that share a scale. 64: a tenth more work than one scale a token, and half the error (measured).
constexpr int64_t kScaled = 64;

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };
enum Epilogue : int32_t { kStore = 0, kAdd = 1, kGate = 2 };

struct Linear {
  int64_t num_outputs, num_inputs;
  int32_t format;
  int32_t gated;     // panels hold kLanes gates and the kLanes values that they gate
  int32_t block_bits;  // 4 or 8: the weights are blocks of such codes; 0: they are not
  int32_t unused;
  char* weights;     // [panels][num_inputs / group][kPanel][group]; blocks: see blocks.h
  float* scales;     // [panels * kPanel], int8 only; null for blocks
  float* bias;       // [panels * kPanel] or null
  int64_t panels() const { return (num_outputs + kPanel - 1) / kPanel; }
};

inline int64_t to_panels(int64_t size) { return (size + kPanel - 1) / kPanel * kPanel; }

// One input row per token, in the form that the weights' format takes.
struct Rows2d {
  float* floats;
  Code* codes;       // for blocks of 4 bits int8_t
  float* scales;     // [tokens, scale_stride], of each kScaled codes; for blocks of each kBlockInputs
  int32_t* offsets;  // [tokens, scale_stride], where the sums of kScaled begin
  float* sums;       // [tokens, scale_stride], for blocks: what the kBlockInputs add up to, as coded
  int64_t stride;    // of floats and of codes, in numbers
  int64_t scale_stride;
};

// Room for the scales of a row, in either grouping.
inline int64_t num_scales(int64_t size) { return (size + 31) / 32; }

struct Product {
  float* out;
  int64_t stride;
  int32_t epilogue, activation;
};

// weights: [num_outputs, num_inputs] float32, rows next to each other; gated: first all gates, then all values. In
// float32 and int8, weights that are blocks are stored as blocks. Throws std::bad_alloc.
Linear* pack_linear(const float* weights, const float* bias, int64_t num_outputs, int64_t num_inputs, int32_t format,
                    bool gated);
void free_linear(Linear* linear);
int64_t weights_bytes(const Linear& linear);

// One member's share of out = in * weights^T, units taken from the counter.
void multiply(const Linear& linear, const Rows2d& in, int64_t num_tokens, const Product& product, int num_threads,
              std::atomic<int64_t>& next);

// One row, padded with zeros to a multiple of kLanes, in the form that `linear` takes, as token `token` of `to`.
void quantize_row(const Linear& linear, const float* row, int64_t token, const Rows2d& to);

// Which row of the weights an output of the packed layer is; num_outputs: none, padding.
inline int64_t source_row(const Linear& linear, int64_t output) {
  if (!linear.gated) return std::min(output, linear.num_outputs);
  int64_t lane = output % kPanel, half = linear.num_outputs / 2;
  int64_t nth = output / kPanel * kLanes + lane % kLanes;  // of the gates, or of the values
  return nth >= half ? linear.num_outputs : lane < kLanes ? nth : half + nth;
}

inline Floats activate(Floats x, int32_t activation) {
  if (activation == kSilu) return x / (1.0f + exponential(-x));
  return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// The end of a product: one token, one panel.
inline void finish(const Product& product, int64_t token, int64_t panel, Floats first, Floats second) {
  if (product.epilogue == kGate) {
    store(product.out + token * product.stride + panel * kLanes, activate(first, product.activation) * second);
    return;
  }
  float* to = product.out + token * product.stride + panel * kPanel;
  if (product.epilogue == kAdd) {
    first += load(to);
    second += load(to + kLanes);
  }
  store(to, first);
  store(to + kLanes, second);
}

}  // namespace octavo
