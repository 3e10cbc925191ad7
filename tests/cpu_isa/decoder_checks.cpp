// The whole step of small decoders against double precision, and its bits by chunk, batch and number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "checks.h"
#include "interface.h"
#include "reference.h"

namespace checks {
namespace {

constexpr int64_t kVocabulary = 75, kHidden = 96, kIntermediate = 160, kBlockSize = 16, kLength = 41;

struct Shape {
  std::string name;
  int format;  // of weights
  bool blocks;
  int kv_format;
  int64_t num_heads, num_kv_heads, head_dim, window;
  bool gelu, all_norms;
  float softcap;
  double allowed;  // as a share of the largest logit
};

std::vector<float> make_weights(Random& random, int64_t count, bool blocks) {
  if (!blocks) return random.numbers(count, 0.12f);
  std::vector<float> made(count);
  for (int64_t i = 0; i < count; ++i) {
    int64_t nth = i % 32;
    float scale = i / 32 % 2 ? 0.015625f : 0.01171875f;  // 2^-6 and three quarters of it
    made[i] = scale * static_cast<float>((nth == 3 ? 0 : nth == 21 ? 15 : random.below(16)) - 8);
  }
  return made;
}

struct Packed {
  std::vector<octavo::Linear*> all;
  ~Packed() {
    for (auto* linear : all) octavo_linear_free(linear);
  }
  octavo::Linear* add(const Shape& shape, Random& random, int64_t outputs, int64_t inputs, bool gated,
                      reference::Weights& as_stored) {
    std::vector<float> weights = make_weights(random, outputs * inputs, shape.blocks);
    std::vector<float> bias = gated ? std::vector<float>{} : random.numbers(outputs, 0.1f);
    as_stored = reference::weights_as_stored(weights, bias, outputs, inputs, shape.format, shape.blocks);
    auto* linear = static_cast<octavo::Linear*>(octavo_linear_pack(
        weights.data(), bias.empty() ? nullptr : bias.data(), outputs, inputs, shape.format, gated));
    all.push_back(linear);
    return linear;
  }
};

std::vector<float> make_norm(Random& random, int64_t size, bool there) {
  std::vector<float> made;
  for (int64_t i = 0; i < size && there; ++i) made.push_back(1.0f + 0.3f * random.number());
  return made;
}

// A model, for the kernels and for the reference.
class Model {
 public:
  explicit Model(const Shape& shape) : shape_(shape), random_(shape.head_dim + shape.format) {
    int64_t heads = shape.num_heads * shape.head_dim, kv = shape.num_kv_heads * shape.head_dim;
    model_.embedding = random_.numbers(kVocabulary * kHidden);
    layers_.resize(2);
    model_.layers.resize(2);
    for (size_t i = 0; i < layers_.size(); ++i) {
      octavo::DecoderLayer& layer = layers_[i];
      reference::Layer& other = model_.layers[i];
      layer = {};
      layer.qkv = packed_.add(shape, random_, heads + 2 * kv, kHidden, false, other.qkv);
      layer.o = packed_.add(shape, random_, kHidden, heads, false, other.o);
      layer.gate_up = packed_.add(shape, random_, 2 * kIntermediate, kHidden, true, other.gate_up);
      layer.down = packed_.add(shape, random_, kHidden, kIntermediate, false, other.down);
      layer.before_attention = norm(other.before_attention, kHidden, true);
      layer.before_mlp = norm(other.before_mlp, kHidden, true);
      layer.after_attention = norm(other.after_attention, kHidden, shape.all_norms);
      layer.after_mlp = norm(other.after_mlp, kHidden, shape.all_norms);
      layer.query = norm(other.query, shape.head_dim, shape.all_norms);
      layer.key = norm(other.key, shape.head_dim, shape.all_norms);
      layer.num_heads = shape.num_heads;
      layer.num_kv_heads = shape.num_kv_heads;
      layer.k_head_dim = layer.v_head_dim = shape.head_dim;
    }
    octavo::Linear* head = packed_.add(shape, random_, kVocabulary, kHidden, false, model_.head);
    decoder_ = {layers_.data(), 2, kHidden, kIntermediate, reinterpret_cast<const char*>(model_.embedding.data()),
                octavo::kFloat32, shape.gelu ? octavo::kGeluTanh : octavo::kSilu, 1.5f, shape.softcap,
                norm(model_.last, kHidden, true), head};
    make_rotary();
    model_.hidden_size = kHidden;
    model_.intermediate_size = kIntermediate;
    model_.num_heads = shape.num_heads;
    model_.num_kv_heads = shape.num_kv_heads;
    model_.head_dim = shape.head_dim;
    model_.window = shape.window;
    model_.gelu = shape.gelu;
    model_.kv_format = shape.kv_format;
    model_.epsilon = 1e-5f;
    model_.scale = scale();
    model_.attention_softcap = model_.logits_softcap = shape.softcap;
    model_.embedding_scale = 1.5;
    model_.cos = cos_.data();
    model_.sin = sin_.data();
    for (auto& plane : planes_) plane.assign(octavo::format_bytes(shape.kv_format) * kv * kBlockSize * kBlocks, 0);
    for (auto& scales : scales_) scales.assign(shape.num_kv_heads * kBlockSize * kBlocks, NAN);
    for (int64_t i = 0; i < kLength; ++i) tokens_.push_back(random_.below(kVocabulary));
  }

  std::vector<std::vector<double>> right() const { return reference::decode(model_, tokens_); }

  // Logits of tokens [first, first + count) of `copies` sequences of the same tokens: [copies * count][vocabulary].
  std::vector<float> run(int64_t first, int64_t count, int64_t copies, int threads) {
    std::vector<int64_t> starts{0}, contexts, write_blocks, write_offsets, ids, positions, logits_tokens;
    std::vector<int32_t> tables;
    for (int64_t copy = 0; copy < copies; ++copy) {
      starts.push_back(starts.back() + count);
      contexts.push_back(first + count);
      for (int64_t i = 0; i < kWidth; ++i) tables.push_back(static_cast<int32_t>((i * 3 + copy) * 7 % kBlocks));
      for (int64_t at = first; at < first + count; ++at) {
        ids.push_back(tokens_[at]);
        positions.push_back(at);
        write_blocks.push_back(tables[copy * kWidth + at / kBlockSize]);
        write_offsets.push_back(at % kBlockSize);
        logits_tokens.push_back(static_cast<int64_t>(logits_tokens.size()));
      }
    }
    int64_t panel = octavo_panel(), stride = (kVocabulary + panel - 1) / panel * panel, rows = copies * count;
    std::vector<float> logits(rows * stride, NAN);
    std::vector<octavo::AttentionLayer> attention;
    for (int64_t layer = 0; layer < 2; ++layer) {
      attention.push_back({plane(2 * layer), plane(2 * layer + 1), shape_.num_heads, shape_.num_kv_heads, shape_.window,
                           scale(), shape_.softcap});
    }
    octavo::RotaryTable rotary{cos_.data(), sin_.data(), shape_.head_dim};
    octavo::Rows packed{copies, rows, kBlockSize, kWidth, starts.data(), contexts.data(), tables.data(),
                        write_blocks.data(), write_offsets.data()};
    octavo::Step step{packed, attention.data(), &rotary, ids.data(), positions.data(), logits_tokens.data(), rows,
                      logits.data(), stride};
    if (octavo_decode(&decoder_, &step, threads)) logits.assign(logits.size(), NAN);
    std::vector<float> kept;
    for (int64_t row = 0; row < rows; ++row) {
      kept.insert(kept.end(), logits.begin() + row * stride, logits.begin() + row * stride + kVocabulary);
    }
    return kept;
  }

 private:
  static constexpr int64_t kWidth = 3, kBlocks = 16;  // for 3 copies

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

  octavo::Norm norm(std::vector<float>& weight, int64_t size, bool there) {
    weight = make_norm(random_, size, there);
    if (!there) return {nullptr, 0, 0};
    norms_.push_back(weight);
    norms_.back().resize(size + 64, 0.0f);
    return {norms_.back().data(), 1e-5f, 0};  // a vector's numbers stay where they are when the vector moves
  }

  void make_rotary() {
    int64_t half = shape_.head_dim / 2;
    for (int64_t position = 0; position < kLength; ++position) {
      for (int64_t i = 0; i < 2 * half; ++i) {
        double angle = position * std::pow(10000.0, -static_cast<double>(i % half) / half);
        cos_.push_back(static_cast<float>(std::cos(angle)));
        sin_.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }

  octavo::KvPlane plane(int64_t nth) {
    int64_t bytes = octavo::format_bytes(shape_.kv_format), token = shape_.head_dim * bytes;
    int64_t head = token * kBlockSize, tokens = 4 * kBlockSize;
    char* scales = shape_.kv_format == octavo::kInt8 ? reinterpret_cast<char*>(scales_[nth].data()) : nullptr;
    return {planes_[nth].data(), head * shape_.num_kv_heads, head, token, bytes, shape_.head_dim, scales,
            tokens * shape_.num_kv_heads, tokens, 4, shape_.kv_format, 0};
  }

  Shape shape_;
  Random random_;
  Packed packed_;
  std::vector<std::vector<float>> norms_;
  std::vector<octavo::DecoderLayer> layers_;
  octavo::Decoder decoder_;
  reference::Model model_;
  std::vector<float> cos_, sin_;
  std::vector<char> planes_[4];
  std::vector<float> scales_[4];
  std::vector<int64_t> tokens_;
};

bool same(const std::vector<float>& one, const float* other) {
  return !std::memcmp(one.data(), other, one.size() * sizeof(float));
}

void check(const Shape& shape) {
  Model model(shape);
  std::vector<float> whole = model.run(0, kLength, 1, 1);
  std::vector<std::vector<double>> right = model.right();
  double largest = 0, worst = 0;
  for (int64_t token = 0; token < kLength; ++token) {
    for (int64_t i = 0; i < kVocabulary; ++i) {
      largest = std::max(largest, std::fabs(right[token][i]));
      double error = std::fabs(whole[token * kVocabulary + i] - right[token][i]);
      if (!(error <= worst)) worst = error;
    }
  }
  report_close("decoder, " + shape.name, worst / largest, shape.allowed);
  report_same("decoder, " + shape.name + ": two threads", same(model.run(0, kLength, 1, 2), whole.data()));
  bool copies = true;
  std::vector<float> batch = model.run(0, kLength, 3, 2);
  for (int64_t copy = 0; copy < 3; ++copy) copies &= same(whole, batch.data() + copy * kLength * kVocabulary);
  report_same("decoder, " + shape.name + ": three at once", copies);
  bool chunks = same(model.run(0, 7, 1, 1), whole.data());
  chunks &= same(model.run(7, 20, 1, 1), whole.data() + 7 * kVocabulary);
  for (int64_t at = 27; at < kLength; ++at) chunks &= same(model.run(at, 1, 1, 1), whole.data() + at * kVocabulary);
  report_same("decoder, " + shape.name + ": a chunk at a time, then a token", chunks);
}

}  // namespace

void check_decoder() {
  using namespace reference;
  check({"float32", kFloat32, false, kFloat32, 4, 2, 64, 0, false, false, 0, 1.5e-6});
  check({"bfloat16", kBfloat16, false, kBfloat16, 4, 1, 32, 0, true, true, 25.0f, 3e-3});
  check({"float16", kFloat16, false, kFloat16, 3, 3, 32, 20, false, true, 0, 5e-4});
  check({"int8", kInt8, false, kFloat32, 4, 2, 64, 0, false, false, 0, 1e-2});
  check({"blocks in float32", kFloat32, true, kFloat32, 4, 2, 64, 0, true, false, 30.0f, 1.5e-6});
  check({"int8, KV too", kInt8, false, kInt8, 6, 2, 64, 0, false, false, 0, 2e-2});
  check({"blocks in int8", kInt8, true, kFloat32, 4, 2, 64, 20, false, true, 0, 1e-2});
}

}  // namespace checks
