// What people and other programs read: tables line up, and the Chrome trace is valid JSON.
#include "table.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "fiw/error.h"
#include "perfetto.h"

namespace fiw::cli {
namespace {

TEST(Table, AlignsColumnsWithoutTrailingBlanks) {
  Table table({{"shape"}, {"ms", Table::Align::kRight}, {"limit"}});
  table.add({"decode", "1.5", "bandwidth"});
  table.add({"p", "100.25", ""});
  std::ostringstream out;
  table.print(out);
  EXPECT_EQ(out.str(),
            "shape       ms  limit\n"
            "decode     1.5  bandwidth\n"
            "p       100.25\n");
}

TEST(Table, HasNoHeadingWithoutTitles) {
  Table table({{""}, {""}});
  table.add({"a", "b"});
  std::ostringstream out;
  table.print(out);
  EXPECT_EQ(out.str(), "a  b\n");
}

TEST(Table, RefusesRowsOfAnotherWidth) {
  Table table({{"a"}, {"b"}});
  EXPECT_THROW(table.add({"1"}), std::logic_error);
}

TEST(ChromeTrace, WritesEventsInMicroseconds) {
  const std::string path = testing::TempDir() + "/chrome_trace_test.json";
  ChromeTrace trace(path);
  const auto start = ChromeTrace::Clock::now();
  trace.span("a \"quoted\" name", "cat", start, start + std::chrono::microseconds(250), {{"rows", 3}});
  trace.counters("pages", start, {{"used", 7}});
  trace.close();
  std::ifstream in(path);
  const nlohmann::json events = nlohmann::json::parse(in)["traceEvents"];
  ASSERT_EQ(events.size(), 4U);  // two of them name the process and the track
  EXPECT_EQ(events[2]["name"], "a \"quoted\" name");
  EXPECT_EQ(events[2]["ph"], "X");
  EXPECT_NEAR(events[2]["dur"].get<double>(), 250.0, 0.01);
  EXPECT_EQ(events[2]["args"]["rows"], 3);
  EXPECT_EQ(events[3]["ph"], "C");
  EXPECT_EQ(events[3]["args"]["used"], 7);
}

TEST(ChromeTrace, NamesAFileThatCannotBeWritten) {
  try {
    ChromeTrace trace("/nonexistent/out.json");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.reason(), Reason::kFileOpen);
    EXPECT_NE(std::string(error.what()).find("/nonexistent/out.json"), std::string::npos);
  }
}

}  // namespace
}  // namespace fiw::cli
