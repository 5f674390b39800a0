// Terminal detection and pacing for the progress line.
#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace fiw::cli {
namespace {

constexpr std::chrono::milliseconds kTerminalInterval{200};
constexpr std::chrono::seconds kLogInterval{5};
constexpr const char* kClearLine = "\r\x1b[2K";

}  // namespace

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1), last_(Clock::now()) {}

Progress::~Progress() {
  if (shown_ && terminal_) std::fputs(kClearLine, stderr);
}

void Progress::update(const std::function<std::string()>& line) {
  const Clock::time_point now = Clock::now();
  if (now - last_ < (terminal_ ? Clock::duration(kTerminalInterval) : Clock::duration(kLogInterval))) return;
  last_ = now;
  shown_ = true;
  if (terminal_) {
    fmt::print(stderr, "{}{}", kClearLine, line());
  } else {
    fmt::print(stderr, "{}\n", line());
  }
  std::fflush(stderr);
}

}  // namespace fiw::cli
