#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace reference {

uint16_t bfloat16_bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  uint32_t rest = word & 0xffff, kept = word >> 16;
  if (rest > 0x8000 || (rest == 0x8000 && (kept & 1))) ++kept;  // to nearest, ties to even
  return static_cast<uint16_t>(kept);
}

uint16_t float16_bits(float value) {
  double magnitude = std::fabs(static_cast<double>(value));
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (magnitude >= 65520) return sign | 0x7c00;
  int exponent = magnitude < std::ldexp(1.0, -14) ? -14 : std::ilogb(magnitude);
  auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // 1024..2048; below: denormal
  return static_cast<uint16_t>(sign | (steps + ((exponent + 14) << 10)));  // a carry into the exponent is right
}

float widened(uint16_t bits, int format) {
  if (format == kBfloat16) {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
  int exponent = bits >> 10 & 31, rest = bits & 1023;
  float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return rest ? NAN : sign * INFINITY;
  double steps = exponent ? 1024 + rest : rest;
  return sign * static_cast<float>(std::ldexp(steps, std::max(exponent, 1) - 25));
}

float stored(float value, int format) {
  if (format == kFloat32) return value;
  return widened(format == kBfloat16 ? bfloat16_bits(value) : float16_bits(value), format);
}

Codes codes_of(const float* line, int64_t size) {
  Codes made;
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(line[i]));
  float inverse = largest > 0 ? 127.0f / largest : 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    float scaled = line[i] * inverse;  // rounded before it becomes a code, as the format has it
    made.codes.push_back(static_cast<int8_t>(std::nearbyint(std::min(127.0f, std::max(-127.0f, scaled)))));
  }
  made.scale = largest / 127.0f;
  return made;
}

std::vector<float> stored_line(const float* line, int64_t size, int format) {
  std::vector<float> made;
  if (format == kInt8) {
    Codes codes = codes_of(line, size);
    for (int8_t code : codes.codes) made.push_back(code * codes.scale);
  } else {
    for (int64_t i = 0; i < size; ++i) made.push_back(stored(line[i], format));
  }
  return made;
}

std::vector<double> rounded(const float* row, int64_t size, int64_t group) {
  std::vector<double> values(size);
  for (int64_t begin = 0; begin < size; begin += group) {
    int64_t end = std::min(begin + group, size);
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(row[i]));
    float scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
    for (int64_t i = begin; i < end; ++i) {
      double code = std::nearbyint(static_cast<double>(row[i]) * inverse);
      values[i] = std::min(127.0, std::max(-127.0, code)) * scale;
    }
  }
  return values;
}

Weights weights_as_stored(const std::vector<float>& weights, const std::vector<float>& bias, int64_t num_outputs,
                          int64_t num_inputs, int format, bool blocks) {
  Weights made{num_outputs, num_inputs, {}, bias, format != kInt8 ? 0 : blocks ? 32 : 64};
  if (format == kInt8 && !blocks) {
    for (int64_t output = 0; output < num_outputs; ++output) {
      std::vector<double> row = rounded(weights.data() + output * num_inputs, num_inputs, num_inputs);
      made.values.insert(made.values.end(), row.begin(), row.end());
    }
    return made;
  }
  for (float weight : weights) made.values.push_back(blocks ? weight : stored(weight, format));
  return made;
}

std::vector<double> product(const Weights& weights, const float* row, std::vector<double>* magnitude) {
  int64_t size = weights.num_inputs;
  std::vector<double> inputs(row, row + size);
  if (weights.input_group) inputs = rounded(row, size, weights.input_group);
  std::vector<double> sums(weights.num_outputs);
  if (magnitude) magnitude->assign(weights.num_outputs, 0);
  for (int64_t output = 0; output < weights.num_outputs; ++output) {
    const double* values = weights.values.data() + output * size;
    double bias = weights.bias.empty() ? 0 : weights.bias[output], sum = bias, all = std::fabs(bias);
    for (int64_t k = 0; k < size; ++k) {
      sum += values[k] * inputs[k];
      all += std::fabs(values[k] * inputs[k]);
    }
    sums[output] = sum;
    if (magnitude) (*magnitude)[output] = all;
  }
  return sums;
}

std::vector<double> attention(const double* query, const std::vector<const float*>& keys,
                              const std::vector<const float*>& values, int64_t k_dim, int64_t v_dim, double scale,
                              double softcap, int64_t window) {
  auto size = static_cast<int64_t>(keys.size());
  int64_t first = window ? std::max<int64_t>(0, size - window) : 0;
  std::vector<double> scores(size);
  double highest = -1e300, total = 0;
  for (int64_t i = first; i < size; ++i) {
    double score = 0;
    for (int64_t d = 0; d < k_dim; ++d) score += query[d] * keys[i][d];
    score *= scale;
    if (softcap > 0) score = std::tanh(score / softcap) * softcap;
    scores[i] = score;
    highest = std::max(highest, score);
  }
  std::vector<double> mixed(v_dim);
  for (int64_t i = first; i < size; ++i) {
    double weight = std::exp(scores[i] - highest);
    total += weight;
    for (int64_t d = 0; d < v_dim; ++d) mixed[d] += weight * values[i][d];
  }
  for (double& value : mixed) value /= total;
  return mixed;
}

namespace {

// float: what a product reads, as the kernels hand it on.
std::vector<float> normalized(const std::vector<float>& weight, const double* row, double epsilon) {
  double squares = 0;
  for (size_t i = 0; i < weight.size(); ++i) squares += row[i] * row[i];
  double share = 1 / std::sqrt(squares / static_cast<double>(weight.size()) + epsilon);
  std::vector<float> made;
  for (size_t i = 0; i < weight.size(); ++i) made.push_back(static_cast<float>(row[i] * share * weight[i]));
  return made;
}

double activated(double x, bool gelu) {
  if (!gelu) return x / (1 + std::exp(-x));
  return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

void add_branch(const Model& model, const std::vector<float>& norm, std::vector<double> branch,
                std::vector<double>& x) {
  if (!norm.empty()) {
    std::vector<float> scaled = normalized(norm, branch.data(), model.epsilon);
    branch.assign(scaled.begin(), scaled.end());
  }
  for (size_t i = 0; i < x.size(); ++i) x[i] += branch[i];
}

void place_head(const Model& model, const std::vector<float>& norm, double* head, int64_t position) {
  int64_t size = model.head_dim, half = size / 2;
  if (!norm.empty()) {
    std::vector<float> scaled = normalized(norm, head, model.epsilon);
    std::copy(scaled.begin(), scaled.end(), head);
  }
  const float *cos = model.cos + position * size, *sin = model.sin + position * size;
  std::vector<double> before(head, head + size);
  for (int64_t i = 0; i < half; ++i) {
    head[i] = before[i] * cos[i] - before[half + i] * sin[i];
    head[half + i] = before[half + i] * cos[half + i] + before[i] * sin[half + i];
  }
}

using Kept = std::vector<std::vector<float>>;  // [positions][kv heads * head_dim], as stored

std::vector<const float*> of_head(const Kept& kept, int64_t offset) {
  std::vector<const float*> lines;
  for (const auto& line : kept) lines.push_back(line.data() + offset);
  return lines;
}

void keep(const Model& model, const double* line, std::vector<float>& to) {
  std::vector<float> floats(line, line + model.head_dim);
  std::vector<float> made = stored_line(floats.data(), model.head_dim, model.kv_format);
  to.insert(to.end(), made.begin(), made.end());
}

void run_layer(const Model& model, const Layer& layer, int64_t position, Kept& keys, Kept& values,
               std::vector<double>& x) {
  int64_t size = model.head_dim, kv_size = model.num_kv_heads * size;
  std::vector<double> qkv = product(layer.qkv, normalized(layer.before_attention, x.data(), model.epsilon).data());
  for (int64_t head = 0; head < model.num_heads + model.num_kv_heads; ++head) {
    place_head(model, head < model.num_heads ? layer.query : layer.key, qkv.data() + head * size, position);
  }
  const double* k = qkv.data() + model.num_heads * size;
  keys.emplace_back();
  values.emplace_back();
  for (int64_t head = 0; head < model.num_kv_heads; ++head) {
    keep(model, k + head * size, keys.back());
    keep(model, k + kv_size + head * size, values.back());
  }
  std::vector<float> mixed;
  for (int64_t head = 0; head < model.num_heads; ++head) {
    int64_t offset = head / (model.num_heads / model.num_kv_heads) * size;
    for (double value : attention(qkv.data() + head * size, of_head(keys, offset), of_head(values, offset), size, size,
                                  model.scale, model.attention_softcap, model.window)) {
      mixed.push_back(static_cast<float>(value));
    }
  }
  add_branch(model, layer.after_attention, product(layer.o, mixed.data()), x);
  std::vector<double> both = product(layer.gate_up, normalized(layer.before_mlp, x.data(), model.epsilon).data());
  std::vector<float> gated;
  for (int64_t i = 0; i < model.intermediate_size; ++i) {
    gated.push_back(static_cast<float>(activated(both[i], model.gelu) * both[model.intermediate_size + i]));
  }
  add_branch(model, layer.after_mlp, product(layer.down, gated.data()), x);
}

}  // namespace

std::vector<std::vector<double>> decode(const Model& model, const std::vector<int64_t>& tokens) {
  std::vector<Kept> keys(model.layers.size()), values(model.layers.size());
  std::vector<std::vector<double>> logits;
  for (size_t position = 0; position < tokens.size(); ++position) {
    std::vector<double> x;
    for (int64_t i = 0; i < model.hidden_size; ++i) {
      x.push_back(model.embedding[tokens[position] * model.hidden_size + i] * model.embedding_scale);
    }
    for (size_t i = 0; i < model.layers.size(); ++i) {
      run_layer(model, model.layers[i], static_cast<int64_t>(position), keys[i], values[i], x);
    }
    logits.push_back(product(model.head, normalized(model.last, x.data(), model.epsilon).data()));
    for (double& logit : logits.back()) {
      if (model.logits_softcap > 0) logit = std::tanh(logit / model.logits_softcap) * model.logits_softcap;
    }
  }
  return logits;
}

}  // namespace reference
