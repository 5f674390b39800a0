// Trace files with bytes changed, lost, doubled and moved: read or refused by the number of a line, never a crash.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "fiw/error.h"
#include "support/random.h"
#include "trace.h"

namespace fiw::cli {
namespace {

class TraceFuzz : public testing::TestWithParam<const char*>, protected test::Seeded {
 protected:
  /// The first lines of a sample.
  static std::string sample(const std::string& name) {
    std::ifstream file(std::string(FIW_DATA_DIR "/") + name);
    std::string text;
    std::string line;
    for (int i = 0; i < 12 && std::getline(file, line); ++i) text += line + "\n";
    return text;
  }

  void damage(std::string& text) {
    if (text.empty()) return;
    const auto size = static_cast<std::int32_t>(text.size());
    const auto at = static_cast<std::size_t>(rng_.uniform(0, size - 1));
    const auto length = static_cast<std::size_t>(rng_.uniform(1, std::min(size, 30)));
    switch (rng_.uniform(0, 6)) {
      case 0:
        text[at] = static_cast<char>(rng_.uniform(0, 255));
        break;
      case 1:
        text[at] = rng_.pick({'\n', '\r', '\0', '"', ',', '-', '9', '[', ']', '{', '}', ':', 'e', '.'});
        break;
      case 2:
        text.erase(at, length);
        break;
      case 3:
        text.insert(at, text.substr(static_cast<std::size_t>(rng_.uniform(0, size - 1)), length));
        break;
      case 4:
        text.resize(at);
        break;
      case 5:
        text.insert(at, rng_.pick<const char*>({"99999999999999999999", "-1", "1e400", "null", "\xEF\xBB\xBF", "\r\n",
                                                "\n\n", "0", "\"\\u0000\"", "18446744073709551615"}));
        break;
      default:
        text.insert(at, std::string(length * 40, rng_.pick({'[', '{', '7', ' ', ','})));
    }
  }
};

TEST_P(TraceFuzz, ReadOrRefusedByLine) {
  constexpr int kRounds = test::rounds(20'000);
  const std::string original = sample(GetParam());
  ASSERT_FALSE(original.empty());
  int read = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::string text = original;
    for (std::int32_t n = rng_.uniform(0, 3); n > 0; --n) damage(text);
    std::istringstream in(text);
    try {
      const Trace trace = read_trace(in, "file");
      ++read;
      ASSERT_FALSE(trace.requests.empty());
      for (const TraceRequest& request : trace.requests) {
        ASSERT_GE(request.prompt_tokens, 1);
        ASSERT_LE(request.prompt_tokens, kMaxTraceTokens);
        ASSERT_GE(request.output_tokens, 0);
        ASSERT_LE(request.output_tokens, kMaxTraceTokens);
        ASSERT_GE(request.arrival_us, 0);
        const std::size_t blocks = (static_cast<std::size_t>(request.prompt_tokens) + kHashBlockTokens - 1) /
                                   static_cast<std::size_t>(kHashBlockTokens);
        ASSERT_TRUE(request.block_hashes.empty() || request.block_hashes.size() == blocks);
      }
      ASSERT_TRUE(std::ranges::is_sorted(trace.requests, {}, &TraceRequest::arrival_us));
    } catch (const Error& error) {
      const std::int64_t lines = 1 + std::ranges::count(text, '\n');
      ASSERT_EQ(error.reason(), Reason::kFileFormat) << error.what();
      ASSERT_GE(error.index(), 1) << error.what();
      ASSERT_LE(error.index(), lines) << error.what();
      const std::string start = "file:" + std::to_string(error.index()) + ": ";
      ASSERT_EQ(std::string(error.what()).substr(0, start.size()), start);
    }
  }
  // Both kinds were met.
  EXPECT_GT(read, kRounds / 10);
  EXPECT_LT(read, kRounds);
}

INSTANTIATE_TEST_SUITE_P(Forms, TraceFuzz,
                         testing::Values("azure_llm_conv_2023_sample.csv", "mooncake_form_sample.jsonl"),
                         [](const auto& param) { return std::string(param.index == 0 ? "azure" : "mooncake"); });

}  // namespace
}  // namespace fiw::cli
