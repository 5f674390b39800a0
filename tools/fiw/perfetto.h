// Writes what happened when as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.
#pragma once

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace fiw::cli {

class ChromeTrace {
 public:
  using Clock = std::chrono::steady_clock;

  /// Opens `path`; times are counted from now. Throws fiw::Error (kFileOpen) if it cannot be written.
  explicit ChromeTrace(const std::string& path);

  /// One span of work; spans nest by time.
  void span(const std::string& name, const std::string& category, Clock::time_point start, Clock::time_point end,
            const nlohmann::json& args = nlohmann::json::object());
  /// The values of a group of counters from `at` on.
  void counters(const std::string& name, Clock::time_point at, const nlohmann::json& values);
  /// Completes the file. Throws fiw::Error if anything could not be written.
  void close();

 private:
  void write(const nlohmann::json& event);
  double microseconds(Clock::time_point at) const;

  std::string path_;
  std::ofstream out_;
  Clock::time_point origin_;
  bool first_ = true;
};

}  // namespace fiw::cli
