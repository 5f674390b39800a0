// Parsing of shapes and element types from flags.
#include "flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

namespace fiw::cli {
namespace {

constexpr std::array kDTypes{DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat8E4M3,
                             DType::kFloat8E5M2};
constexpr std::int32_t kMaxHeads = 1024;
constexpr std::int32_t kMaxHeadDim = 576;

/// The whole number that `text` is, or 0 if it is not one of at least 1.
std::int32_t positive(std::string_view text) {
  std::int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::max(value, 0) : 0;
}

template <class Integer>
void add_number(CLI::App& app, const std::string& flag, Integer& value, const std::string& help) {
  app.add_option_function<std::string>(
         flag,
         [&value, flag](const std::string& text) {
           Integer given = 0;
           const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), given);
           if (error != std::errc() || end != text.data() + text.size() || given < Integer{0}) {
             throw CLI::ValidationError(flag, fmt::format("'{}' is not a whole number from 0 to {}", text,
                                                          std::numeric_limits<Integer>::max()));
           }
           value = given;
         },
         help)
      ->type_name("N")
      ->default_str(fmt::format("{}", value));
}

}  // namespace

void add_number_flag(CLI::App& app, const std::string& flag, std::int64_t& value, const std::string& help) {
  add_number(app, flag, value, help);
}

void add_number_flag(CLI::App& app, const std::string& flag, std::uint64_t& value, const std::string& help) {
  add_number(app, flag, value, help);
}

void add_heads_flag(CLI::App& app, HeadCounts& heads) {
  app.add_option_function<std::string>(
         "--heads",
         [&heads](const std::string& text) {
           const std::size_t slash = text.find('/');
           const std::int32_t qo = positive(std::string_view(text).substr(0, slash));
           const std::int32_t kv = slash == std::string::npos ? 0 : positive(std::string_view(text).substr(slash + 1));
           if (qo == 0 || kv == 0 || qo % kv != 0 || qo > kMaxHeads) {
             throw CLI::ValidationError(
                 "--heads", fmt::format("'{}' is not Q/KV with KV dividing Q and Q at most {}", text, kMaxHeads));
           }
           heads = {qo, kv};
         },
         "Query heads / KV heads")
      ->type_name("Q/KV")
      ->default_str(fmt::format("{}/{}", heads.qo, heads.kv));
}

void add_dtype_flag(CLI::App& app, const std::string& flag, DType& dtype, bool cache, const std::string& help) {
  std::string names;
  for (const DType candidate : kDTypes) {
    if (is_fp8(candidate) && !cache) continue;
    names += fmt::format("{}{}", names.empty() ? "" : "|", short_name(candidate));
  }
  app.add_option_function<std::string>(
         flag,
         [&dtype, flag, cache, names](const std::string& text) {
           for (const DType candidate : kDTypes) {
             if (text != short_name(candidate) || (is_fp8(candidate) && !cache)) continue;
             dtype = candidate;
             return;
           }
           throw CLI::ValidationError(flag, fmt::format("'{}' is not one of {}", text, names));
         },
         help)
      ->type_name(names)
      ->default_str(std::string(short_name(dtype)));
}

void add_head_dim_flag(CLI::App& app, std::int32_t& head_dim) {
  app.add_option("--head-dim", head_dim, "Elements of a head")
      ->check([](const std::string& text) {
        const std::int32_t value = positive(text);
        if (value > 0 && value % 8 == 0 && value <= kMaxHeadDim) return std::string();
        return fmt::format("'{}' is not a multiple of 8 from 8 to {}", text, kMaxHeadDim);
      })
      ->type_name("N");
}

void add_device_flag(CLI::App& app, int& device) {
  app.add_option("--device", device, "Device to run on; -1 is the CPU")->check(CLI::Range(-1, 1023))->type_name("N");
}

void add_threads_flag(CLI::App& app, std::int32_t& threads) {
  app.add_option("--threads", threads, "CPU threads; 0: as many as OpenMP gives")
      ->check(CLI::Range(0, 4096))
      ->type_name("N");
}

std::string_view short_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat8E4M3:
      return "fp8_e4m3";
    case DType::kFloat8E5M2:
      return "fp8_e5m2";
  }
  return "?";
}

}  // namespace fiw::cli
