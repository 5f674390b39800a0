// Serving traces: who asked for how many tokens, and when. Two public forms are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <string>
#include <string_view>
#include <vector>

namespace fiw::cli {

/// Prompt tokens that one Mooncake block hash stands for.
inline constexpr std::int32_t kHashBlockTokens = 512;
/// The longest prompt or answer a trace line may ask for; far above any model's context.
inline constexpr std::int32_t kMaxTraceTokens = 100'000'000;

struct TraceRequest {
  std::int64_t arrival_us = 0;  ///< since the first request
  std::int32_t prompt_tokens = 0;
  std::int32_t output_tokens = 0;
  std::vector<std::uint64_t> block_hashes;  ///< one for every started block of the prompt; empty: shares nothing
};

enum class TraceForm : std::uint8_t { kAzureCsv, kMooncakeJsonLines };

std::string_view to_string(TraceForm form) noexcept;

struct Trace {
  TraceForm form = TraceForm::kAzureCsv;
  std::vector<TraceRequest> requests;  ///< by arrival; equal times keep the file's order
};

/// Reads a whole trace, in either form:
///   Azure CSV: the header `TIMESTAMP,ContextTokens,GeneratedTokens`, then lines such as `2023-11-16
///   18:15:46.6805900,374,44`; Mooncake JSON lines: `{"timestamp": ms, "input_length": n, "output_length": n,
///   "hash_ids": [...]}` with one id for every started block of 512 prompt tokens, or none at all.
/// LF and CRLF both end a line; the last line needs no ending. Throws fiw::Error (kFileFormat, index() = line number)
/// whose message starts with "name:line: " for a line that is not of the form, and for a file that holds no request.
Trace read_trace(std::istream& in, const std::string& name);
/// As above; kFileOpen when the file cannot be read.
Trace read_trace_file(const std::string& path);

}  // namespace fiw::cli
