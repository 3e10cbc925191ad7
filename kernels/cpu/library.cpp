// The plain C interface that Python calls through ctypes. One function is one team of threads at work.
//
// The team is OpenMP's, of the runtime that PyTorch has loaded: the thread that calls keeps one team for PyTorch's
// operators and for these, and no second set of threads fights for the processors. Nothing is thrown across the border:
// a function that can run out of memory returns null or nonzero.
#include <omp.h>

#include <atomic>
#include <exception>
#include <vector>

#include "attention.h"
#include "decoder.h"
#include "linear.h"
#include "simd.h"

using namespace octavo;

extern "C" {

// What was compiled for: lanes of a vector of floats.
int octavo_lanes() { return kLanes; }

void* octavo_attention_begin(const Rows* rows, const AttentionLayer* layer, int threads) {
  try {
    return new AttentionWork(*rows, *layer, threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void octavo_attention_end(void* work) { delete static_cast<AttentionWork*>(work); }

// Writes key and value into their blocks, then attends. `work` was begun with these rows and a layer of this shape.
void octavo_attention(const Rows* rows, const AttentionLayer* layer, void* work, const HeadsIn* query,
                      const HeadsIn* key, const HeadsIn* value, const HeadsOut* out, int threads) {
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < rows->num_tokens; ++token) {
      int64_t block = rows->write_blocks[token], offset = rows->write_offsets[token];
      write_token(layer->k, layer->num_kv_heads, block, offset, key->data + token * key->token_stride,
                  key->head_stride);
      write_token(layer->v, layer->num_kv_heads, block, offset, value->data + token * value->token_stride,
                  value->head_stride);
    }
    static_cast<AttentionWork*>(work)->attend(*layer, *query, *out, omp_get_thread_num(), next);
  }
}

// weights: [num_outputs, num_inputs]. Null where there is no memory.
void* octavo_linear_pack(const float* weights, const float* bias, int64_t num_outputs, int64_t num_inputs, int format,
                         int gated) {
  try {
    return pack_linear(weights, bias, num_outputs, num_inputs, format, gated);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Bytes of the packed weights; scales and bias have a float per output, up to a whole panel.
int64_t octavo_linear_bytes(const Linear* linear) { return weights_bytes(*linear); }

// What the layout of packed weights depends on; what was packed in one is read only in the same.
int64_t octavo_linear_layout() { return (kPanel * 100 + kGroup) * 1000 + kWeightZero; }

void octavo_linear_free(void* linear) { free_linear(static_cast<Linear*>(linear)); }

// Outputs that a row of logits has room for: a whole number of panels.
int64_t octavo_panel() { return kPanel; }

// out: [num_tokens, num_outputs up to a whole panel]; in: [num_tokens, num_inputs up to a whole panel].
int octavo_linear(const Linear* linear, const float* in, int64_t num_tokens, float* out, int threads) {
  try {
    int64_t stride = to_panels(linear->num_inputs);
    std::vector<Code> codes(linear->format == kInt8 ? num_tokens * stride : 0);
    int64_t scale_stride = num_scales(stride);
    std::vector<float> scales(num_tokens * scale_stride), sums(num_tokens * scale_stride);
    std::vector<int32_t> offsets(num_tokens * scale_stride);
    Rows2d rows{const_cast<float*>(in), codes.data(), scales.data(), offsets.data(), sums.data(), stride, scale_stride};
    for (int64_t i = 0; i < num_tokens && linear->format == kInt8; ++i) quantize_row(*linear, in + i * stride, i, rows);
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
    multiply(*linear, rows, num_tokens, Product{out, to_panels(linear->num_outputs), kStore, 0}, threads, next);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// Nonzero where there is no memory; nothing was written then.
int octavo_decode(const Decoder* decoder, const Step* step, int threads) {
  try {
    decode(*decoder, *step, threads);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

}  // extern "C"
