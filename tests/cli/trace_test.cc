// The trace readers: both forms read exactly, every kind of bad line named.
#include "trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "fiw/error.h"
#include "seed.h"

namespace fiw::cli {
namespace {

constexpr const char* kHeader = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

Trace read(const std::string& text) {
  std::istringstream in(text);
  return read_trace(in, "t");
}

TEST(AzureTrace, ReadsFieldsAndTimes) {
  const Trace trace = read(std::string(kHeader) +
                           "2023-11-16 23:59:59.6805900,374,44\r\n"
                           "2023-11-17 00:00:00.0000001,396,109\n"
                           "2023-11-17 00:00:00.5,1,0");
  EXPECT_EQ(trace.form, TraceForm::kAzureCsv);
  ASSERT_EQ(trace.requests.size(), 3U);
  EXPECT_EQ(trace.requests[0].arrival_us, 0);
  EXPECT_EQ(trace.requests[1].arrival_us, 319'410);
  EXPECT_EQ(trace.requests[2].arrival_us, 819'410);
  EXPECT_EQ(trace.requests[0].prompt_tokens, 374);
  EXPECT_EQ(trace.requests[0].output_tokens, 44);
  EXPECT_EQ(trace.requests[2].output_tokens, 0);
  EXPECT_TRUE(trace.requests[0].block_hashes.empty());
}

TEST(AzureTrace, OrdersByArrivalAndKeepsTies) {
  const Trace trace = read(std::string(kHeader) +
                           "2023-11-16 18:15:47,1,1\n"
                           "2023-11-16 18:15:46,2,1\n"
                           "2023-11-16 18:15:46,3,1\n");
  EXPECT_EQ(trace.requests[0].prompt_tokens, 2);
  EXPECT_EQ(trace.requests[1].prompt_tokens, 3);
  EXPECT_EQ(trace.requests[2].prompt_tokens, 1);
  EXPECT_EQ(trace.requests[2].arrival_us, 1'000'000);
}

TEST(MooncakeTrace, ReadsFieldsAndHashes) {
  const Trace trace = read(
      "{\"timestamp\": 1000, \"input_length\": 513, \"output_length\": 9, \"hash_ids\": [7, 18446744073709551615]}\n"
      "{\"hash_ids\": [], \"timestamp\": 1000.5, \"input_length\": 5, \"output_length\": 0, \"more\": null}");
  EXPECT_EQ(trace.form, TraceForm::kMooncakeJsonLines);
  ASSERT_EQ(trace.requests.size(), 2U);
  EXPECT_EQ(trace.requests[0].block_hashes, (std::vector<std::uint64_t>{7, UINT64_MAX}));
  EXPECT_EQ(trace.requests[0].prompt_tokens, 513);
  EXPECT_EQ(trace.requests[1].arrival_us, 500);
  EXPECT_TRUE(trace.requests[1].block_hashes.empty());
}

struct BadTrace {
  std::string text;
  std::int64_t line;
  std::string message;
};

class BadTraces : public testing::TestWithParam<BadTrace> {};

TEST_P(BadTraces, NamesLineAndFault) {
  try {
    read(GetParam().text);
    FAIL() << "accepted:\n" << GetParam().text;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
    EXPECT_EQ(error.reason(), Reason::kFileFormat);
    EXPECT_EQ(error.index(), GetParam().line);
    EXPECT_THAT(error.what(), testing::StartsWith("t:" + std::to_string(GetParam().line) + ": "));
    EXPECT_THAT(error.what(), testing::HasSubstr(GetParam().message));
  }
}

std::string azure(const std::string& line) {
  return std::string(kHeader) + "2023-11-16 18:15:46.6805900,374,44\n" + line + "\n";
}

std::string mooncake(const std::string& line) {
  return "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [1]}\n" + line + "\n";
}

INSTANTIATE_TEST_SUITE_P(
    Azure, BadTraces,
    testing::Values(
        BadTrace{"", 1, "empty"}, BadTrace{"\n", 1, "expected the header"}, BadTrace{kHeader, 1, "no request"},
        BadTrace{"TIMESTAMP,ContextTokens\n", 1, "expected the header"},
        BadTrace{"2023-11-16 18:15:46.6805900,374,44\n", 1, "expected the header"},
        BadTrace{azure(""), 3, "empty line"}, BadTrace{azure("2023-11-16 18:15:46.6805900,374"), 3, "has 2 fields"},
        BadTrace{azure("2023-11-16 18:1"), 3, "has 1 field,"}, BadTrace{azure("a,1,2,3"), 3, "has 4 fields"},
        BadTrace{azure("2023-11-16T18:15:46,1,2"), 3, "TIMESTAMP is '2023-11-16T18:15:46'"},
        BadTrace{azure("2023-02-30 18:15:46,1,2"), 3, "TIMESTAMP"},
        BadTrace{azure("2023-11-16 24:00:00,1,2"), 3, "TIMESTAMP"},
        BadTrace{azure("2023-11-16 18:15:46.,1,2"), 3, "TIMESTAMP"},
        BadTrace{azure("2023-11-16 18:15:46.0123456789,1,2"), 3, "TIMESTAMP"},
        BadTrace{azure("2023-11-16 18:15:46.12x,1,2"), 3, "TIMESTAMP"},
        BadTrace{azure("2023-11-16 18:15:46,0,2"), 3, "ContextTokens is '0', expected a whole number from 1"},
        BadTrace{azure("2023-11-16 18:15:46,,2"), 3, "ContextTokens is ''"},
        BadTrace{azure("2023-11-16 18:15:46,12a,2"), 3, "ContextTokens is '12a'"},
        BadTrace{azure("2023-11-16 18:15:46, 12,2"), 3, "ContextTokens is ' 12'"},
        BadTrace{azure("2023-11-16 18:15:46,12,-2"), 3, "GeneratedTokens is '-2', expected a whole number from 0"},
        BadTrace{azure("2023-11-16 18:15:46,12,1.5"), 3, "GeneratedTokens is '1.5'"},
        BadTrace{azure("2023-11-16 18:15:46,99999999999999999999,1"), 3, "ContextTokens is '99999999999999999999'"},
        BadTrace{azure("2023-11-16 18:15:46,100000001,1"), 3, "ContextTokens"}));

INSTANTIATE_TEST_SUITE_P(
    Mooncake, BadTraces,
    testing::Values(
        BadTrace{"{}\n", 1, "\"timestamp\" is missing"},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_len"), 2, "not a complete JSON object"},
        BadTrace{mooncake("{\"timestamp\": 0} x"), 2, "not a complete JSON object"},
        BadTrace{mooncake("[1]"), 2, "is not a JSON object"},
        BadTrace{mooncake("{\"timestamp\": 1e999, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": []}"), 2,
                 "out of range"},
        BadTrace{mooncake("{\"timestamp\": -1, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": []}"), 2,
                 "\"timestamp\" is -1"},
        BadTrace{mooncake("{\"timestamp\": \"0\", \"input_length\": 5, \"output_length\": 1, \"hash_ids\": []}"), 2,
                 "\"timestamp\" is \"0\""},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_length\": 0, \"output_length\": 1, \"hash_ids\": []}"), 2,
                 "\"input_length\" is '0'"},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_length\": 5.5, \"output_length\": 1, \"hash_ids\": []}"), 2,
                 "\"input_length\" is '5.5'"},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_length\": 5, \"hash_ids\": []}"), 2,
                 "\"output_length\" is missing"},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1}"), 2,
                 "\"hash_ids\" is missing"},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": 3}"), 2,
                 "\"hash_ids\" is 3, expected an array"},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [-3]}"), 2,
                 "\"hash_ids\" holds -3"},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": [[]]}"), 2,
                 "\"hash_ids\" holds an array"},
        BadTrace{mooncake("{\"timestamp\": 0, \"input_length\": 1025, \"output_length\": 1, \"hash_ids\": [1, 2]}"), 2,
                 "has 2 ids, expected 3"}));

TEST(TraceFile, MissingFileIsNamed) {
  try {
    read_trace_file("/nonexistent/trace.csv");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.reason(), Reason::kFileOpen);
    EXPECT_THAT(error.what(), testing::HasSubstr("/nonexistent/trace.csv"));
  }
}

class TraceFuzz : public SeededTest {
 protected:
  /// Either a trace whose every request is in bounds, or the one exception with a line number within the text.
  void read_or_refuse(const std::string& text) {
    const auto lines = std::count(text.begin(), text.end(), '\n') + 1;
    try {
      const Trace trace = read(text);
      ASSERT_FALSE(trace.requests.empty());
      std::int64_t last = 0;
      for (const TraceRequest& request : trace.requests) {
        ASSERT_GE(request.arrival_us, last);
        ASSERT_GE(request.prompt_tokens, 1);
        ASSERT_GE(request.output_tokens, 0);
        ASSERT_LE(request.prompt_tokens, kMaxTraceTokens);
        ASSERT_LE(request.output_tokens, kMaxTraceTokens);
        last = request.arrival_us;
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.reason(), Reason::kFileFormat) << text;
      ASSERT_GE(error.index(), 1) << text;
      ASSERT_LE(error.index(), lines) << text;
    }
  }

  std::vector<std::string> good_ = {
      std::string(kHeader) + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n",
      "{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [1, 2]}\n"
      "{\"timestamp\": 5, \"input_length\": 1200, \"output_length\": 8, \"hash_ids\": [1, 2, 9]}\n"};
};

TEST_F(TraceFuzz, EveryTruncation) {
  for (const std::string& good : good_) {
    for (std::size_t size = 0; size <= good.size(); ++size) read_or_refuse(good.substr(0, size));
  }
}

TEST_F(TraceFuzz, DamagedBytes) {
  for (int round = 0; round < 20'000; ++round) {
    std::string text = good_[round % good_.size()];
    for (int damage = between(1, 4); damage > 0; --damage) {
      const auto at = static_cast<std::size_t>(between(0, static_cast<std::int32_t>(text.size()) - 1));
      const char byte = static_cast<char>(between(0, 255));
      switch (between(0, 2)) {
        case 0:
          text[at] = byte;
          break;
        case 1:
          text.insert(at, 1, byte);
          break;
        default:
          text.erase(at, 1);
      }
    }
    read_or_refuse(text);
  }
}

TEST_F(TraceFuzz, RandomBytesAndDeepNesting) {
  for (int round = 0; round < 2'000; ++round) {
    std::string text(static_cast<std::size_t>(between(0, 200)), '\0');
    for (char& byte : text) byte = static_cast<char>(between(0, 255));
    read_or_refuse(text);
    read_or_refuse("{" + text);
    read_or_refuse(kHeader + text);
  }
  const std::string deep(200'000, '[');
  read_or_refuse("{\"timestamp\": " + deep);
  read_or_refuse("{\"timestamp\": " + deep + std::string(deep.size(), ']') + "}");
}

}  // namespace
}  // namespace fiw::cli
