// Reads traces line by line and refuses whatever is not exactly of the form, naming the line.
#include "trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "fiw/error.h"

namespace fiw::cli {
namespace {

constexpr std::string_view kAzureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens";
constexpr std::size_t kShownCharacters = 60;

/// The text as it may stand in a message: short, and printable.
std::string shown(std::string_view text) {
  std::string result(text.substr(0, kShownCharacters));
  for (char& c : result) {
    if (c < ' ' || c > '~') c = '?';
  }
  return text.size() > kShownCharacters ? result + "..." : result;
}

struct Line {
  const std::string& file;
  std::int64_t number;
  std::string_view text;

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(Status::kInvalidArgument, Reason::kFileFormat, fmt::format("{}:{}: {}", file, number, what)).at(number);
  }
};

std::optional<std::int64_t> whole_number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::int32_t token_count(const Line& line, std::string_view field, std::optional<std::int64_t> value,
                         std::string_view text, std::int32_t least) {
  if (!value || *value < least || *value > kMaxTraceTokens) {
    line.fail(
        fmt::format("{} is '{}', expected a whole number from {} to {}", field, shown(text), least, kMaxTraceTokens));
  }
  return static_cast<std::int32_t>(*value);
}

/// Exactly `digits` decimal digits at `at`.
std::optional<int> digits_at(std::string_view text, std::size_t at, std::size_t digits) {
  if (at + digits > text.size()) return std::nullopt;
  int value = 0;
  for (const char c : text.substr(at, digits)) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  return value;
}

/// "YYYY-MM-DD HH:MM:SS" with up to nine digits of fraction, as microseconds; finer digits are dropped.
std::optional<std::int64_t> timestamp_us(std::string_view text) {
  constexpr std::string_view kShape = "0000-00-00 00:00:00";
  if (text.size() < kShape.size()) return std::nullopt;
  for (const std::size_t at : {4U, 7U, 10U, 13U, 16U}) {
    if (text[at] != kShape[at]) return std::nullopt;
  }
  const auto year = digits_at(text, 0, 4);
  const auto month = digits_at(text, 5, 2);
  const auto day = digits_at(text, 8, 2);
  const auto hour = digits_at(text, 11, 2);
  const auto minute = digits_at(text, 14, 2);
  const auto second = digits_at(text, 17, 2);
  if (!year || !month || !day || !hour || !minute || !second) return std::nullopt;
  const std::chrono::year_month_day date{std::chrono::year(*year), std::chrono::month(static_cast<unsigned>(*month)),
                                         std::chrono::day(static_cast<unsigned>(*day))};
  if (!date.ok() || *hour > 23 || *minute > 59 || *second > 59) return std::nullopt;

  std::int64_t fraction_us = 0;
  if (text.size() > kShape.size()) {
    const std::size_t digits = text.size() - kShape.size() - 1;
    if (text[kShape.size()] != '.' || digits < 1 || digits > 9) return std::nullopt;
    const auto fraction = digits_at(text, kShape.size() + 1, digits);
    if (!fraction) return std::nullopt;
    fraction_us = *fraction;
    for (std::size_t i = digits; i < 6; ++i) fraction_us *= 10;
    for (std::size_t i = 6; i < digits; ++i) fraction_us /= 10;
  }
  const std::int64_t days = std::chrono::sys_days(date).time_since_epoch().count();
  return ((days * 24 + *hour) * 60 + *minute) * 60'000'000 + *second * std::int64_t{1'000'000} + fraction_us;
}

TraceRequest parse_azure(const Line& line) {
  std::array<std::string_view, 3> fields;
  std::size_t count = 0;
  std::string_view rest = line.text;
  while (true) {
    const std::size_t comma = rest.find(',');
    if (count < fields.size()) fields[count] = rest.substr(0, comma);
    ++count;
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  if (count != fields.size()) {
    line.fail(fmt::format("'{}' has {} field{}, expected 3 ({})", shown(line.text), count, count == 1 ? "" : "s",
                          kAzureHeader));
  }
  const auto arrival = timestamp_us(fields[0]);
  if (!arrival) {
    line.fail(fmt::format("TIMESTAMP is '{}', expected the form 2023-11-16 18:15:46.6805900", shown(fields[0])));
  }
  TraceRequest request;
  request.arrival_us = *arrival;
  request.prompt_tokens = token_count(line, "ContextTokens", whole_number(fields[1]), fields[1], 1);
  request.output_tokens = token_count(line, "GeneratedTokens", whole_number(fields[2]), fields[2], 0);
  return request;
}

const nlohmann::json& member(const Line& line, const nlohmann::json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) line.fail(fmt::format("\"{}\" is missing", name));
  return *found;
}

std::string text_of(const nlohmann::json& value) {
  if (value.is_structured()) return value.is_array() ? "an array" : "an object";  // dumping nested ones would recurse
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::optional<std::int64_t> whole_number(const nlohmann::json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) return std::nullopt;
  return value.get<std::int64_t>();
}

TraceRequest parse_mooncake(const Line& line) {
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(line.text);
  } catch (const nlohmann::json::parse_error& error) {
    line.fail(fmt::format("not a complete JSON object: '{}' breaks off or goes wrong at byte {}", shown(line.text),
                          error.byte));
  } catch (const nlohmann::json::exception&) {  // a number beyond what a double holds
    line.fail(fmt::format("'{}' holds a number out of range", shown(line.text)));
  }
  if (!object.is_object()) line.fail(fmt::format("'{}' is not a JSON object", shown(line.text)));

  constexpr double kMaxTimestampMs = 1e15;
  const nlohmann::json& timestamp = member(line, object, "timestamp");
  if (!timestamp.is_number() || timestamp.get<double>() < 0 || timestamp.get<double>() > kMaxTimestampMs) {
    line.fail(fmt::format("\"timestamp\" is {}, expected milliseconds from 0 to 1e15", shown(text_of(timestamp))));
  }
  const nlohmann::json& input = member(line, object, "input_length");
  const nlohmann::json& output = member(line, object, "output_length");
  TraceRequest request;
  request.arrival_us = std::llround(timestamp.get<double>() * 1000.0);
  request.prompt_tokens = token_count(line, "\"input_length\"", whole_number(input), text_of(input), 1);
  request.output_tokens = token_count(line, "\"output_length\"", whole_number(output), text_of(output), 0);

  const nlohmann::json& hashes = member(line, object, "hash_ids");
  if (!hashes.is_array()) line.fail(fmt::format("\"hash_ids\" is {}, expected an array", shown(text_of(hashes))));
  const std::size_t blocks =
      (static_cast<std::size_t>(request.prompt_tokens) + kHashBlockTokens - 1) / kHashBlockTokens;
  if (!hashes.empty() && hashes.size() != blocks) {
    line.fail(fmt::format("\"hash_ids\" has {} ids, expected {}: one for every {} tokens of input_length {}",
                          hashes.size(), blocks, kHashBlockTokens, request.prompt_tokens));
  }
  request.block_hashes.reserve(hashes.size());
  for (const nlohmann::json& hash : hashes) {
    if (!hash.is_number_unsigned()) {
      line.fail(fmt::format("\"hash_ids\" holds {}, expected whole numbers of at least 0", shown(text_of(hash))));
    }
    request.block_hashes.push_back(hash.get<std::uint64_t>());
  }
  return request;
}

}  // namespace

std::string_view to_string(TraceForm form) noexcept {
  return form == TraceForm::kAzureCsv ? "Azure CSV" : "Mooncake JSON lines";
}

Trace read_trace(std::istream& in, const std::string& name) {
  Trace trace;
  std::string text;
  std::int64_t number = 0;
  while (std::getline(in, text)) {
    ++number;
    if (!text.empty() && text.back() == '\r') text.pop_back();
    const Line line{name, number, text};
    if (number == 1) {
      if (text == kAzureHeader) {
        trace.form = TraceForm::kAzureCsv;
        continue;
      }
      if (text.empty() || text.front() != '{') {
        line.fail(fmt::format("starts with '{}', expected the header {} or a JSON object", shown(text), kAzureHeader));
      }
      trace.form = TraceForm::kMooncakeJsonLines;
    }
    if (text.empty()) line.fail("empty line");
    trace.requests.push_back(trace.form == TraceForm::kAzureCsv ? parse_azure(line) : parse_mooncake(line));
  }
  if (in.bad()) throw Error(Status::kInvalidArgument, Reason::kFileOpen, fmt::format("{}: cannot be read", name));
  if (trace.requests.empty()) {
    Line{name, std::max<std::int64_t>(number, 1), text}.fail(number == 0 ? "the file is empty"
                                                                         : "the file holds a header but no request");
  }
  std::stable_sort(trace.requests.begin(), trace.requests.end(),
                   [](const TraceRequest& a, const TraceRequest& b) { return a.arrival_us < b.arrival_us; });
  const std::int64_t first = trace.requests.front().arrival_us;
  for (TraceRequest& request : trace.requests) request.arrival_us -= first;
  return trace;
}

Trace read_trace_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    throw Error(Status::kInvalidArgument, Reason::kFileOpen,
                fmt::format("{}: cannot be opened: {}", path, std::generic_category().message(errno)));
  }
  return read_trace(in, path);
}

}  // namespace fiw::cli
