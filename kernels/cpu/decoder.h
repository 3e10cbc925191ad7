// A decoder of gated layers as one call per step: what the rewritten model hands over, and what a step brings.
//
//   x += after_attention(attention(rotate(norms(qkv(before_attention(x)))))) ... x += after_mlp(down(gate * up(...)))
//
// Norms that a model does not have are null. Which models are of this form is found out in Python.
#pragma once

#include <cstdint>

#include "attention.h"
#include "linear.h"

namespace octavo {

// x / sqrt(mean(x^2) + epsilon) * weight
struct Norm {
  const float* weight;  // zeros behind its size up to a whole panel; null: no norm here
  float epsilon;
  int32_t unused;
};

struct DecoderLayer {
  const Linear *qkv, *o, *gate_up, *down;
  Norm before_attention, after_attention, before_mlp, after_mlp;
  Norm query, key;  // per head, before the rotation
  int64_t num_heads, num_kv_heads, k_head_dim, v_head_dim;
  int64_t rotary;  // which of the step's rotary tables
};

struct Decoder {
  const DecoderLayer* layers;
  int64_t num_layers, hidden_size, intermediate_size;
  const char* embedding;  // [vocabulary, hidden_size]
  int32_t embedding_format, activation;
  float embedding_scale, logits_softcap;  // 0: none
  Norm last;
  const Linear* head;
};

struct RotaryTable {
  const float *cos, *sin;  // [positions, rotary_dim]
  int64_t rotary_dim;
};

struct Step {
  Rows rows;
  const AttentionLayer* attention;  // [num_layers]
  const RotaryTable* rotary;
  const int64_t* input_ids;  // [num_tokens]
  const int64_t* positions;  // [num_tokens]
  const int64_t* logits_tokens;  // [num_logits] -> token
  int64_t num_logits;
  float* logits;  // [num_logits, logits_stride], a whole number of panels
  int64_t logits_stride;
};

// Runs one step. Throws std::bad_alloc before anything is written.
void decode(const Decoder& decoder, const Step& step, int num_threads);

}  // namespace octavo
