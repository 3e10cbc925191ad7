// The C interface of kernels/cpu/library.cpp, as Python calls it.
#pragma once

#include "attention.h"
#include "decoder.h"
#include "linear.h"

extern "C" {
int octavo_lanes();
void* octavo_attention_begin(const octavo::Rows* rows, const octavo::AttentionLayer* layer, int threads);
void octavo_attention_end(void* work);
void octavo_attention(const octavo::Rows* rows, const octavo::AttentionLayer* layer, void* work,
                      const octavo::HeadsIn* query, const octavo::HeadsIn* key, const octavo::HeadsIn* value,
                      const octavo::HeadsOut* out, int threads);
void* octavo_linear_pack(const float* weights, const float* bias, int64_t num_outputs, int64_t num_inputs, int format,
                         int gated);
void octavo_linear_free(void* linear);
int64_t octavo_linear_layout();
int64_t octavo_panel();
int octavo_linear(const octavo::Linear* linear, const float* in, int64_t num_tokens, float* out, int threads);
int octavo_decode(const octavo::Decoder* decoder, const octavo::Step* step, int threads);
}
