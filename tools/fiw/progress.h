// A progress line on stderr: rewritten in place on a terminal, a fresh line every few seconds elsewhere.
#pragma once

#include <chrono>
#include <functional>
#include <string>

namespace fiw::cli {

class Progress {
 public:
  Progress();
  /// Clears the line on a terminal.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows what `line` returns if it is time to; cheap otherwise.
  void update(const std::function<std::string()>& line);

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_;
  bool shown_ = false;
  Clock::time_point last_;
};

}  // namespace fiw::cli
