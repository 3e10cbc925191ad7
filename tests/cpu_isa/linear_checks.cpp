// Products of every weights format: whole numbers bit for bit, others close to double precision, a token's bits alone
// and among others.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "checks.h"
#include "interface.h"
#include "reference.h"

namespace checks {
namespace {

const char* const kNames[] = {"float32", "bfloat16", "float16", "int8"};
constexpr int64_t kMostTokens = 140;  // past kRowBlock and kUnpackedRows of every processor

enum Kind { kDense, kBlocks4, kBlocks8 };
const char* const kKinds[] = {"dense", "blocks of 4 bits", "blocks of 8 bits"};

struct Case {
  int64_t num_outputs, num_inputs;
  int format;
  Kind kind;
  std::vector<float> weights, bias, inputs;  // inputs: [kMostTokens, num_inputs]
  std::string name() const {
    return std::string(kNames[format]) + ", " + kKinds[kind] + ", " + std::to_string(num_outputs) + " by " +
           std::to_string(num_inputs);
  }
};

// Rows next to each other, padded to whole panels.
std::vector<float> run(const Case& some, const octavo::Linear* linear, int64_t first, int64_t count, int threads) {
  int64_t panel = octavo_panel(), stride = (some.num_inputs + panel - 1) / panel * panel;
  int64_t width = (some.num_outputs + panel - 1) / panel * panel;
  std::vector<float> in(count * stride), out(count * width, NAN);
  for (int64_t token = 0; token < count; ++token) {
    const float* from = some.inputs.data() + (first + token) * some.num_inputs;
    std::copy_n(from, some.num_inputs, in.data() + token * stride);
  }
  if (octavo_linear(linear, in.data(), count, out.data(), threads)) out.assign(out.size(), NAN);
  std::vector<float> kept;
  for (int64_t token = 0; token < count; ++token) {
    kept.insert(kept.end(), out.begin() + token * width, out.begin() + token * width + some.num_outputs);
  }
  return kept;
}

bool same_bits(const float* one, const float* other, int64_t count) { return !std::memcmp(one, other, count * 4); }

void check_batches(const Case& some, const octavo::Linear* linear, const std::vector<float>& whole) {
  bool same = same_bits(run(some, linear, 0, kMostTokens, 2).data(), whole.data(), whole.size());
  for (int64_t count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 18, 19, 25}) {
    int64_t first = count * 2;
    std::vector<float> part = run(some, linear, first, count, 1);
    same &= same_bits(part.data(), whole.data() + first * some.num_outputs, part.size());
  }
  report_same(some.name() + ": 1 to 25 tokens of 140, and two threads", same);
}

// allowed: of the sum of all terms' magnitudes; 0: the same bits.
void check(const Case& some, double allowed) {
  auto* linear = static_cast<octavo::Linear*>(
      octavo_linear_pack(some.weights.data(), some.bias.empty() ? nullptr : some.bias.data(), some.num_outputs,
                         some.num_inputs, some.format, 0));
  bool blocks = some.kind != kDense && (some.format == reference::kFloat32 || some.format == reference::kInt8);
  report_same(some.name() + ": stored as such", linear->block_bits == (blocks ? some.kind == kBlocks4 ? 4 : 8 : 0));
  reference::Weights weights =
      reference::weights_as_stored(some.weights, some.bias, some.num_outputs, some.num_inputs, some.format, blocks);
  std::vector<float> whole = run(some, linear, 0, kMostTokens, 1);
  double worst = 0;
  for (int64_t token = 0; token < kMostTokens; token += token < 26 ? 1 : 7) {
    std::vector<double> magnitude;
    std::vector<double> right = reference::product(weights, some.inputs.data() + token * some.num_inputs, &magnitude);
    for (int64_t output = 0; output < some.num_outputs; ++output) {
      double error = std::fabs(whole[token * some.num_outputs + output] - right[output]);
      if (!(error <= worst * magnitude[output])) worst = magnitude[output] > 0 ? error / magnitude[output] : error;
    }
  }
  report_close(some.name() + (allowed ? "" : ", whole numbers"), worst, allowed);
  check_batches(some, linear, whole);
  octavo_linear_free(linear);
}

// Weights whose blocks the kernels find, with the whole range of codes in each.
std::vector<float> make_blocks(Random& random, int64_t count, Kind kind, bool whole_numbers) {
  std::vector<float> made;
  for (int64_t block = 0; block < count / 32; ++block) {
    float scale = whole_numbers ? static_cast<float>(1 << random.below(2)) : 0.01f + 0.01f * std::fabs(random.number());
    float least = kind == kBlocks4 ? (whole_numbers ? -8.0f * scale : random.number()) : 0.0f;
    scale = reference::stored(scale, reference::kFloat16);
    least = reference::stored(least, reference::kFloat16);
    for (int64_t i = 0; i < 32; ++i) {
      int64_t code = kind == kBlocks4 ? (i == 3 ? 0 : i == 21 ? 15 : random.below(16))
                                      : (i == 3 ? -127 : i == 21 ? 127 : random.below(255) - 127);
      made.push_back(std::fma(static_cast<float>(code), scale, least));
    }
  }
  return made;
}

// Codes that are their own values: the largest of each 32 is 127, or all are.
std::vector<float> make_codes(Random& random, int64_t rows, int64_t size, int extreme) {
  std::vector<float> made(rows * size);
  for (int64_t i = 0; i < rows * size; ++i) {
    made[i] = static_cast<float>(random.below(255) - 127);
    if (i % size % 32 == 5 || i % size == size - 1) made[i] = random.below(2) ? 127.0f : -127.0f;
    if (extreme) made[i] = static_cast<float>(127 * extreme);
  }
  return made;
}

Case make_whole(Random& random, int64_t num_outputs, int64_t num_inputs, Kind kind, int extreme) {
  Case some{num_outputs, num_inputs, reference::kInt8, kind, {}, {}, {}};
  if (kind == kDense) {
    some.weights = make_codes(random, num_outputs, num_inputs, extreme ? 1 : 0);
  } else {
    some.weights = make_blocks(random, num_outputs * num_inputs, kind, true);
    if (extreme) {
      for (size_t i = 0; i < some.weights.size(); ++i) {
        if (i % 32 > 1) some.weights[i] = kind == kBlocks4 ? 7.0f : 127.0f;
        if (i % 32 == 0) some.weights[i] = kind == kBlocks4 ? -8.0f : -127.0f;
        if (i % 32 == 1) some.weights[i] = kind == kBlocks4 ? 6.0f : 126.0f;
      }
    }
  }
  some.inputs = make_codes(random, kMostTokens, num_inputs, extreme);
  for (int64_t i = 0; i < num_outputs; ++i) some.bias.push_back(static_cast<float>(random.below(100)));
  return some;
}

}  // namespace

void check_linear() {
  Random random(1);
  const int64_t sizes[][2] = {{1, 32}, {40, 64}, {70, 320}, {33, 544}};
  for (Kind kind : {kDense, kBlocks4, kBlocks8}) {
    for (auto [outputs, inputs] : sizes) {
      int64_t more = kind == kDense;  // whole numbers are blocks, where their number is a multiple of 32
      check(make_whole(random, outputs, inputs + more, kind, 0), 0);
      for (int format : {reference::kFloat32, reference::kBfloat16, reference::kFloat16, reference::kInt8}) {
        if (kind != kDense && format != reference::kFloat32 && format != reference::kInt8) continue;
        Case some{outputs, inputs, format, kind, {}, {}, random.numbers(kMostTokens * inputs)};
        some.weights = kind == kDense ? random.numbers(outputs * inputs)
                                      : make_blocks(random, outputs * inputs, kind, false);
        if (outputs != 70) some.bias = random.numbers(outputs);
        check(some, 6e-7);
      }
    }
    for (int extreme : {1, -1}) check(make_whole(random, 40, kind == kDense ? 257 : 256, kind, extreme), 0);
  }
  for (int format : {reference::kFloat32, reference::kBfloat16, reference::kFloat16, reference::kInt8}) {  // odd sizes
    for (auto [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 1}, {100, 131}, {5, 65}}) {
      check(Case{outputs, inputs, format, kDense, random.numbers(outputs * inputs), random.numbers(outputs),
                 random.numbers(kMostTokens * inputs)},
            6e-7);
    }
  }
}

}  // namespace checks
