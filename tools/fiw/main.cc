// Entry point of `fiw`: parses the command line, turns exceptions into messages and exit codes.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <iostream>

#include "commands.h"
#include "fiw/error.h"

namespace fiw::cli {
namespace {

int run(int argc, char** argv) {
  CLI::App app(
      "Paged attention for LLM inference engines, from the command line.\n"
      "Results go to stdout, everything else to stderr.\n"
      "Exit codes: 0 all is well, 1 something failed, 2 the command line makes no sense.",
      "fiw");
  app.set_version_flag("--version", FIW_VERSION);
  app.require_subcommand(0, 1);  // so that a misspelt one is named instead of reported missing
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

  int exit_code = kExitOk;
  add_info_command(app, exit_code);
  add_check_command(app, exit_code);
  add_replay_command(app, exit_code);
  add_bench_command(app, exit_code);
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) throw UsageError("a subcommand is required; see fiw --help");
    return exit_code;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  } catch (const UsageError& error) {
    fmt::print(stderr, "fiw: {}\n", error.what());
    return kExitUsage;
  } catch (const Error& error) {
    fmt::print(stderr, "fiw: {}\n", error.what());
    return error.reason() == Reason::kOptions ? kExitUsage : kExitFailure;
  } catch (const std::exception& error) {
    fmt::print(stderr, "fiw: {}\n", error.what());
    return kExitFailure;
  }
}

}  // namespace
}  // namespace fiw::cli

int main(int argc, char** argv) {
  const int exit_code = fiw::cli::run(argc, argv);
  std::cout.flush();
  if (!std::cout || std::fflush(stdout) != 0) {
    fmt::print(stderr, "fiw: cannot write the results to stdout\n");
    return fiw::cli::kExitFailure;
  }
  return exit_code;
}
