// The subcommands. Each adds its flags to the command line and runs from a callback that CLI11 calls after parsing.
#pragma once

#include <CLI/CLI.hpp>
#include <stdexcept>

namespace fiw::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;  ///< a check failed, a file is bad, a device is missing
inline constexpr int kExitUsage = 2;    ///< the command line makes no sense

/// Flags that are each well-formed but do not go together.
struct UsageError : std::runtime_error {
  using runtime_error::runtime_error;
};

/// Each callback leaves its exit code in `exit_code`, which must outlive `app`.
void add_info_command(CLI::App& app, int& exit_code);
void add_check_command(CLI::App& app, int& exit_code);
void add_replay_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);

}  // namespace fiw::cli
