// The step of a decoder: one team of threads goes through all layers, a barrier between the stages of each.
#include "decoder.h"

#include <omp.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "simd.h"

namespace octavo {
namespace {

constexpr int64_t kStagesPerLayer = 5;  // stages whose units are taken from a counter

// Zeroed: what lies behind a row's size must be a number.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : memory_(std::aligned_alloc(64, std::max<int64_t>(64, (bytes + 63) / 64 * 64))) {
    if (!memory_) throw std::bad_alloc();
    std::memset(memory_.get(), 0, bytes);
  }
  float* floats() const { return static_cast<float*>(memory_.get()); }
  int32_t* words() const { return static_cast<int32_t*>(memory_.get()); }
  Code* codes() const { return static_cast<Code*>(memory_.get()); }

 private:
  std::unique_ptr<void, Free> memory_;
};

void normalize(const Norm& norm, const float* row, int64_t size, float* to) {
  Floats squares{};
  int64_t whole = size / kLanes * kLanes;
  for (int64_t at = 0; at < whole; at += kLanes) squares += load(row + at) * load(row + at);
  float sum = sum_lanes(squares);
  for (int64_t at = whole; at < size; ++at) sum += row[at] * row[at];
  float scale = 1.0f / std::sqrt(sum / static_cast<float>(size) + norm.epsilon);
  for (int64_t at = 0; at < whole; at += kLanes) store(to + at, load(row + at) * scale * load(norm.weight + at));
  for (int64_t at = whole; at < size; ++at) to[at] = row[at] * scale * norm.weight[at];
}

// Rotates the first dimensions of one head: x * cos + (-x2, x1) * sin, the halves of Su et al. 2021 (RoFormer).
void rotate(float* head, const float* cos, const float* sin, int64_t rotary_dim) {
  int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    float first = head[i], second = head[half + i];
    head[i] = first * cos[i] - second * sin[i];
    head[half + i] = second * cos[half + i] + first * sin[half + i];
  }
}

class Run {
 public:
  Run(const Decoder& decoder, const Step& step, int num_threads)
      : decoder_(decoder),
        step_(step),
        num_threads_(num_threads),
        tokens_(step.rows.num_tokens),
        hidden_(to_panels(decoder.hidden_size)),
        qkv_(widest_qkv()),
        mixed_(widest_mixed()),
        widest_(std::max({hidden_, mixed_, to_panels(decoder.intermediate_size)})),
        x_(tokens_ * hidden_ * 4),
        branch_(tokens_ * hidden_ * 4),
        qkv_rows_(tokens_ * qkv_ * 4),
        mixed_rows_(tokens_ * mixed_ * 4),
        gated_rows_(tokens_ * to_panels(decoder.intermediate_size) * 4),
        inputs_(std::max(tokens_, step.num_logits)),  // a row may draw several tokens
        input_floats_(inputs_ * widest_ * 4),
        input_codes_(inputs_ * widest_ * static_cast<int64_t>(sizeof(Code))),
        scale_stride_(num_scales(widest_)),
        input_scales_(inputs_ * scale_stride_ * 4),
        input_offsets_(inputs_ * scale_stride_ * 4),
        input_sums_(inputs_ * scale_stride_ * 4),
        counters_(decoder.num_layers * kStagesPerLayer + 1) {
    for (int64_t layer = 0; layer < decoder.num_layers; ++layer) work_of_layer_.push_back(work_like(layer));
  }

  void set_team(int num_threads) { num_threads_ = num_threads; }

  // What one member of the team does; all do at the same time.
  void member(int thread) {
    embed(thread);
    for (int64_t layer = 0; layer < decoder_.num_layers; ++layer) run_layer(layer, thread);
    head(thread);
  }

 private:
  int64_t widest_qkv() const {
    int64_t widest = 0;
    for (int64_t i = 0; i < decoder_.num_layers; ++i) widest = std::max(widest, decoder_.layers[i].qkv->num_outputs);
    return to_panels(widest);
  }

  int64_t widest_mixed() const {
    int64_t widest = 0;
    for (int64_t i = 0; i < decoder_.num_layers; ++i) widest = std::max(widest, decoder_.layers[i].o->num_inputs);
    return to_panels(widest);
  }

  // Layers of one shape share a cut.
  AttentionWork* work_like(int64_t layer) {
    const AttentionLayer& own = step_.attention[layer];
    for (int64_t i = 0; i < layer; ++i) {
      const AttentionLayer& other = step_.attention[i];
      if (other.window == own.window && other.num_heads == own.num_heads && other.num_kv_heads == own.num_kv_heads &&
          other.k.head_dim == own.k.head_dim && other.v.head_dim == own.v.head_dim) {
        return work_of_layer_[i];
      }
    }
    works_.push_back(std::make_unique<AttentionWork>(step_.rows, own, num_threads_));
    return works_.back().get();
  }

  // Tokens of one member: as even as can be.
  template <typename Do>
  void each_token(int thread, int64_t count, Do&& run) const {
    int64_t end = count * (thread + 1) / num_threads_;
    for (int64_t token = count * thread / num_threads_; token < end; ++token) run(token);
  }

  void embed(int thread) {
    int64_t size = decoder_.hidden_size, bytes = format_bytes(decoder_.embedding_format);
    each_token(thread, tokens_, [&](int64_t token) {
      const char* from = decoder_.embedding + step_.input_ids[token] * size * bytes;
      float* to = x_.floats() + token * hidden_;
      for (int64_t i = 0; i < size; ++i) {
        to[i] = widen(from + i * bytes, decoder_.embedding_format) * decoder_.embedding_scale;
      }
    });
  }

  // The inputs of a product: rows, in place or as codes.
  Rows2d inputs(const Linear& linear, float* rows, int64_t stride) const {
    return Rows2d{rows, input_codes_.codes(), input_scales_.floats(), input_offsets_.words(), input_sums_.floats(),
                  linear.format == kInt8 ? widest_ : stride, scale_stride_};
  }

  void encode(const Linear& linear, const float* row, int64_t token) const {
    if (linear.format != kInt8) return;
    quantize_row(linear, row, token, inputs(linear, nullptr, 0));
  }

  void normalize_into(const Norm& norm, const Linear& linear, const float* row, int64_t token) const {
    float* to = input_floats_.floats() + token * widest_;
    normalize(norm, row, decoder_.hidden_size, to);
    encode(linear, to, token);
  }

  void run_layer(int64_t index, int thread) {
    const DecoderLayer& layer = decoder_.layers[index];
    std::atomic<int64_t>* counters = counters_.data() + index * kStagesPerLayer;
    float* x = x_.floats();
    each_token(thread, tokens_, [&](int64_t token) {
      normalize_into(layer.before_attention, *layer.qkv, x + token * hidden_, token);
    });
    barrier();
    multiply(*layer.qkv, inputs(*layer.qkv, input_floats_.floats(), widest_), tokens_,
             Product{qkv_rows_.floats(), qkv_, kStore, 0}, num_threads_, counters[0]);
    barrier();
    each_token(thread, tokens_, [&](int64_t token) { place(layer, step_.attention[index], token); });
    barrier();
    int64_t v_stride = layer.v_head_dim;
    work_of_layer_[index]->attend(step_.attention[index], HeadsIn{qkv_rows_.floats(), qkv_, layer.k_head_dim},
                                  HeadsOut{mixed_rows_.floats(), mixed_, v_stride}, thread, counters[1]);
    barrier();
    each_token(thread, tokens_, [&](int64_t token) {
      encode(*layer.o, mixed_rows_.floats() + token * mixed_, token);
    });
    if (layer.o->format == kInt8) barrier();
    add_branch(*layer.o, layer.after_attention, inputs(*layer.o, mixed_rows_.floats(), mixed_), counters[2], thread);
    each_token(thread, tokens_, [&](int64_t token) {
      normalize_into(layer.before_mlp, *layer.gate_up, x + token * hidden_, token);
    });
    barrier();
    int64_t gated = to_panels(decoder_.intermediate_size);
    multiply(*layer.gate_up, inputs(*layer.gate_up, input_floats_.floats(), widest_), tokens_,
             Product{gated_rows_.floats(), gated, kGate, decoder_.activation}, num_threads_, counters[3]);
    barrier();
    each_token(thread, tokens_, [&](int64_t token) {
      encode(*layer.down, gated_rows_.floats() + token * gated, token);
    });
    if (layer.down->format == kInt8) barrier();
    add_branch(*layer.down, layer.after_mlp, inputs(*layer.down, gated_rows_.floats(), gated), counters[4], thread);
  }

  // x += linear(in), normalized where the layer does. Ends with x whole for the tokens of this member.
  void add_branch(const Linear& linear, const Norm& norm, const Rows2d& in, std::atomic<int64_t>& next, int thread) {
    Product product{x_.floats(), hidden_, kAdd, 0};
    if (norm.weight) product = Product{branch_.floats(), hidden_, kStore, 0};
    multiply(linear, in, tokens_, product, num_threads_, next);
    barrier();
    if (!norm.weight) return;
    each_token(thread, tokens_, [&](int64_t token) {
      float *branch = branch_.floats() + token * hidden_, *x = x_.floats() + token * hidden_;
      normalize(norm, branch, decoder_.hidden_size, branch);
      for (int64_t at = 0; at < hidden_; at += kLanes) store(x + at, load(x + at) + load(branch + at));
    });
  }

  // One token's queries and keys rotated, its K and V into their block.
  void place(const DecoderLayer& layer, const AttentionLayer& attention, int64_t token) const {
    float* q = qkv_rows_.floats() + token * qkv_;
    float *k = q + layer.num_heads * layer.k_head_dim, *v = k + layer.num_kv_heads * layer.k_head_dim;
    const RotaryTable& table = step_.rotary[layer.rotary];
    const float* cos = table.cos + step_.positions[token] * table.rotary_dim;
    const float* sin = table.sin + step_.positions[token] * table.rotary_dim;
    for (int64_t head = 0; head < layer.num_heads + layer.num_kv_heads; ++head) {
      float* own = q + head * layer.k_head_dim;
      const Norm& norm = head < layer.num_heads ? layer.query : layer.key;
      if (norm.weight) normalize(norm, own, layer.k_head_dim, own);
      rotate(own, cos, sin, table.rotary_dim);
    }
    int64_t block = step_.rows.write_blocks[token], offset = step_.rows.write_offsets[token];
    write_token(attention.k, layer.num_kv_heads, block, offset, k, layer.k_head_dim);
    write_token(attention.v, layer.num_kv_heads, block, offset, v, layer.v_head_dim);
  }

  void head(int thread) {
    barrier();
    each_token(thread, step_.num_logits, [&](int64_t row) {
      normalize_into(decoder_.last, *decoder_.head, x_.floats() + step_.logits_tokens[row] * hidden_, row);
    });
    barrier();
    multiply(*decoder_.head, inputs(*decoder_.head, input_floats_.floats(), widest_), step_.num_logits,
             Product{step_.logits, step_.logits_stride, kStore, 0}, num_threads_,
             counters_[decoder_.num_layers * kStagesPerLayer]);
    if (decoder_.logits_softcap <= 0) return;
    barrier();
    each_token(thread, step_.num_logits, [&](int64_t row) {
      float* logits = step_.logits + row * step_.logits_stride;
      for (int64_t at = 0; at < step_.logits_stride; at += kLanes) {
        store(logits + at, hyperbolic_tangent(load(logits + at) / decoder_.logits_softcap) * decoder_.logits_softcap);
      }
    });
  }

  static void barrier() {
#pragma omp barrier
  }

  const Decoder& decoder_;
  const Step& step_;
  int num_threads_;
  int64_t tokens_, hidden_, qkv_, mixed_, widest_;
  Buffer x_, branch_, qkv_rows_, mixed_rows_, gated_rows_;
  int64_t inputs_;
  Buffer input_floats_, input_codes_;
  int64_t scale_stride_;
  Buffer input_scales_, input_offsets_, input_sums_;
  std::vector<std::atomic<int64_t>> counters_;
  std::vector<std::unique_ptr<AttentionWork>> works_;
  std::vector<AttentionWork*> work_of_layer_;
};

}  // namespace

void decode(const Decoder& decoder, const Step& step, int num_threads) {
  Run run(decoder, step, num_threads);
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp single
    run.set_team(omp_get_num_threads());  // which may be fewer than were asked for
    run.member(omp_get_thread_num());
  }
}

}  // namespace octavo
