// The JSON object form of the Chrome trace format, one event a line.
#include "perfetto.h"

#include <fmt/format.h>

#include <cerrno>
#include <system_error>

#include "fiw/error.h"

namespace fiw::cli {

ChromeTrace::ChromeTrace(const std::string& path) : path_(path), out_(path, std::ios::binary), origin_(Clock::now()) {
  if (!out_) {
    throw Error(Status::kInvalidArgument, Reason::kFileOpen,
                fmt::format("{}: cannot be written: {}", path, std::generic_category().message(errno)));
  }
  out_ << R"({"displayTimeUnit": "ms", "traceEvents": [)";
  write({{"ph", "M"}, {"pid", 1}, {"tid", 1}, {"name", "process_name"}, {"args", {{"name", "fiw replay"}}}});
  write({{"ph", "M"}, {"pid", 1}, {"tid", 1}, {"name", "thread_name"}, {"args", {{"name", "steps"}}}});
}

void ChromeTrace::span(const std::string& name, const std::string& category, Clock::time_point start,
                       Clock::time_point end, const nlohmann::json& args) {
  write({{"ph", "X"},
         {"pid", 1},
         {"tid", 1},
         {"name", name},
         {"cat", category},
         {"ts", microseconds(start)},
         {"dur", microseconds(end) - microseconds(start)},
         {"args", args}});
}

void ChromeTrace::counters(const std::string& name, Clock::time_point at, const nlohmann::json& values) {
  write({{"ph", "C"}, {"pid", 1}, {"tid", 1}, {"name", name}, {"ts", microseconds(at)}, {"args", values}});
}

void ChromeTrace::close() {
  out_ << "\n]}\n";
  out_.close();
  if (!out_) {
    throw Error(Status::kInvalidArgument, Reason::kFileOpen, fmt::format("{}: writing failed", path_));
  }
}

void ChromeTrace::write(const nlohmann::json& event) {
  out_ << (first_ ? "\n" : ",\n") << event.dump();
  first_ = false;
}

double ChromeTrace::microseconds(Clock::time_point at) const {
  return std::chrono::duration<double, std::micro>(at - origin_).count();
}

}  // namespace fiw::cli
