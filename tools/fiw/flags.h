// Flags that several subcommands share, parsed the same way everywhere.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>

#include "fiw/types.h"

namespace fiw::cli {

struct HeadCounts {
  std::int32_t qo = 32;
  std::int32_t kv = 8;
};

/// "32/8": query heads / KV heads.
void add_heads_flag(CLI::App& app, HeadCounts& heads);
/// "bf16", "fp16", "fp32", and for caches also "fp8_e4m3" and "fp8_e5m2".
void add_dtype_flag(CLI::App& app, const std::string& flag, DType& dtype, bool cache, const std::string& help);
/// A whole number in decimal digits, from 0 to what `value` holds.
void add_number_flag(CLI::App& app, const std::string& flag, std::int64_t& value, const std::string& help);
void add_number_flag(CLI::App& app, const std::string& flag, std::uint64_t& value, const std::string& help);
void add_head_dim_flag(CLI::App& app, std::int32_t& head_dim);
void add_device_flag(CLI::App& app, int& device);
void add_threads_flag(CLI::App& app, std::int32_t& threads);

/// The short name that the flags use.
std::string_view short_name(DType dtype) noexcept;

}  // namespace fiw::cli
