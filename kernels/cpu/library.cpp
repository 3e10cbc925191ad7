// The plain C interface that Python calls through ctypes. One function is one team of threads at work.
//
// The team is OpenMP's, of the runtime that PyTorch has loaded: the thread that calls keeps one team for PyTorch's
// operators and for these, and no second set of threads fights for the processors. Nothing is thrown across the border:
// a function that can run out of memory returns null or nonzero.
#include <omp.h>

#include <atomic>
#include <exception>

#include "attention.h"
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

}  // extern "C"
