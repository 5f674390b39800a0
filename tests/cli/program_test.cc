// The program as people run it: output, messages, files and exit codes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fiw/workspace.h"

namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr const char* kAzureSample = FIW_DATA_DIR "/azure_llm_conv_2023_sample.csv";
constexpr const char* kMooncakeSample = FIW_DATA_DIR "/mooncake_form_sample.jsonl";
/// A model small enough for any machine.
const std::string kSmall = " --heads 4/2 --head-dim 32 --layers 2 --pages 600 --max-batch 8 --token-budget 256 ";

struct Output {
  int code = -1;
  std::string out;
  std::string err;

  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

class Program : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::path(testing::TempDir()) / (std::string("fiw_program_test_") + std::to_string(getpid()) + "_" +
                                                     testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
    return path(name);
  }

  static std::string read(const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    return text.str();
  }

  Output run(const std::string& arguments) const {
    Output output = run_to(path("stdout"), arguments);
    output.out = read(path("stdout"));
    return output;
  }
  Output run_to(const std::string& out, const std::string& arguments) const {
    const std::string command =
        std::string(FIW_PROGRAM) + " " + arguments + " >" + out + " 2>" + path("stderr") + " </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, "", read(path("stderr"))};
  }

  /// Runs, expects success, and parses the JSON on stdout.
  nlohmann::json results(const std::string& arguments) const {
    const Output output = run(arguments + " --json");
    EXPECT_EQ(output.code, 0) << output.err;
    return output.code == 0 ? output.json() : nlohmann::json();
  }

 private:
  std::filesystem::path folder_;
};

// --- the command line itself
// --------------------------------------------------------------------------------------------

TEST_F(Program, ResultsThatCannotBeWrittenAreAFailure) {
  for (const std::string& arguments : {std::string("info"), std::string("--help"), std::string("--version"),
                                       std::string("info --json"), std::string("replay --simulate ") + kAzureSample}) {
    const Output output = run_to("/dev/full", arguments);
    EXPECT_EQ(output.code, 1) << arguments;
    EXPECT_NE(output.err.find("stdout"), std::string::npos) << arguments << ": " << output.err;
  }
}

TEST_F(Program, VersionIsOneLine) {
  const Output output = run("--version");
  EXPECT_EQ(output.code, 0);
  EXPECT_EQ(output.out, FIW_VERSION "\n");
  EXPECT_EQ(output.err, "");
}

TEST_F(Program, HelpNamesEverySubcommandAndFlag) {
  const Output all = run("--help");
  EXPECT_EQ(all.code, 0);
  for (const char* name : {"info", "check", "replay", "bench", "Exit codes"}) EXPECT_THAT(all.out, HasSubstr(name));
  const Output replay = run("replay --help");
  EXPECT_EQ(replay.code, 0);
  for (const char* flag :
       {"TRACE",       "--requests", "--layers",    "--heads",        "--head-dim",  "--dtype",      "--kv-dtype",
        "--page-size", "--pages",    "--max-batch", "--token-budget", "--speculate", "--acceptance", "--verify",
        "--graphs",    "--seed",     "--device",    "--threads",      "--simulate",  "--trace-out",  "--json"}) {
    EXPECT_THAT(replay.out, HasSubstr(flag));
  }
}

TEST_F(Program, BadCommandLinesExitWithTwoAndSayWhy) {
  const std::string trace = std::string("replay ") + kAzureSample + " ";
  const std::pair<std::string, std::string> cases[] = {
      {"", "subcommand is required"},
      {"frobnicate", "frobnicate"},
      {"replay", "TRACE is required"},
      {"info --nonsense", "--nonsense"},
      {trace + "--heads 32", "'32' is not Q/KV"},
      {trace + "--heads 32/5", "'32/5' is not Q/KV"},
      {trace + "--heads 0/0", "'0/0' is not Q/KV"},
      {trace + "--head-dim 100", "'100' is not a multiple of 8"},
      {trace + "--dtype fp8_e4m3", "'fp8_e4m3' is not one of bf16|fp16|fp32"},
      {trace + "--kv-dtype int4", "'int4' is not one of bf16|fp16|fp32|fp8_e4m3|fp8_e5m2"},
      {trace + "--layers 0", "--layers"},
      {trace + "--speculate 64", "--speculate"},
      {trace + "--acceptance 1.5", "--acceptance"},
      {trace + "--verify -3", "--verify"},
      {trace + "--requests 99999999999999999999", "'99999999999999999999' is not a whole number"},
      {trace + "--requests 9223372036854775808", "'9223372036854775808' is not a whole number"},
      {trace + "--requests -1", "'-1' is not a whole number"},
      {trace + "--verify 99999999999999999999", "'99999999999999999999' is not a whole number"},
      {trace + "--seed 18446744073709551616", "'18446744073709551616' is not a whole number"},
      {trace + "--seed -1", "'-1' is not a whole number"},
      {"check --seed 1e3", "'1e3' is not a whole number"},
      {trace + "--layers 99999999999999999999", "--layers"},
      {trace + "--pages 99999999999999999999", "--pages"},
      {trace + "--max-batch 32 --token-budget 31", "token budget is 31, expected at least 32"},
      {trace + "--speculate 7 --max-batch 65 --token-budget 519", "token budget is 519, expected at least 520"},
      {trace + "--simulate --verify 5", "--simulate"},
      {trace + "--simulate --graphs", "--simulate computes nothing, so it does not go with --graphs"},
      {trace + "--trace-out ''", "--trace-out"},
      {"check --filter no-such-case", "'no-such-case' matches no case"},
      {"bench --filter no-such-shape", "'no-such-shape' matches no shape"},
  };
  for (const auto& [arguments, message] : cases) {
    const Output output = run(arguments);
    EXPECT_EQ(output.code, 2) << arguments << '\n' << output.err;
    EXPECT_THAT(output.err, HasSubstr(message)) << arguments;
    EXPECT_EQ(output.out, "") << arguments;
  }
}

TEST_F(Program, ADeviceThatThisBuildCannotDriveIsAFailure) {
  const Output output = run(std::string("replay ") + kAzureSample + " --device 99 --requests 1");
  EXPECT_EQ(output.code, 1);
  EXPECT_THAT(output.err, StartsWith("fiw: device_index is 99, "));
}

// --- info, check
// --------------------------------------------------------------------------------------------------------

TEST_F(Program, InfoTellsWhatIsThere) {
  const nlohmann::json info = results("info");
  EXPECT_EQ(info["version"], FIW_VERSION);
  const bool cuda = fiw::FlashInferWorkspace::compiled_with(fiw::DeviceKind::kCuda);
  EXPECT_EQ(info["backends"], cuda ? nlohmann::json({"cpu", "cuda"}) : nlohmann::json::array({"cpu"}));
  EXPECT_EQ(info["devices"][0]["index"], -1);
  EXPECT_GE(info["devices"][0]["workers"].get<int>(), 1);
  const std::string state = info["cuda"].get<std::string>();
  if (info["devices"].size() > 1) {
    EXPECT_EQ(state, "present");
    EXPECT_EQ(info["devices"][1]["kind"], "cuda");
  } else {
    EXPECT_THAT(state, HasSubstr(cuda ? "no CUDA device is present" : "not compiled in"));
  }
  const auto available = info["simd"]["available"].get<std::vector<std::string>>();
  EXPECT_THAT(available, testing::Contains(info["simd"]["chosen"].get<std::string>()));
  EXPECT_GE(info["defaults"]["cache_entries"].get<int>(), 1);

  const Output people = run("info");
  EXPECT_EQ(people.code, 0);
  EXPECT_EQ(people.err, "");
  EXPECT_THAT(people.out, HasSubstr("SIMD chosen"));
  EXPECT_THAT(people.out, HasSubstr(info["simd"]["chosen"].get<std::string>()));
  EXPECT_THAT(people.out, HasSubstr(state));
}

TEST_F(Program, CheckPassesOnThisMachine) {
  const nlohmann::json checked = results("check --filter D80 --seed 12345");
  EXPECT_EQ(checked["failures"], 0);
  EXPECT_EQ(checked["seed"], 12345);
  ASSERT_EQ(checked["cases"].size(), 2U);
  for (const nlohmann::json& c : checked["cases"]) {
    EXPECT_TRUE(c["ok"].get<bool>()) << c;
    EXPECT_GT(c["values"].get<int>(), 1000);
  }
}

TEST_F(Program, CheckPrintsATable) {
  const Output output = run("check --filter merge");
  EXPECT_EQ(output.code, 0) << output.out;
  EXPECT_THAT(output.out, StartsWith("call"));
  EXPECT_THAT(output.out, HasSubstr("97/97"));
  EXPECT_THAT(output.out, HasSubstr("6 cases, 0 wrong (seed 1)\n"));
}

// --- replay
// -------------------------------------------------------------------------------------------------------------

TEST_F(Program, ReplaysAzureTracesAndVerifies) {
  const nlohmann::json r = results(std::string("replay ") + kAzureSample + kSmall + "--requests 8 --verify 40");
  EXPECT_EQ(r["form"], "Azure CSV");
  EXPECT_EQ(r["requests"]["in_file"], 300);
  EXPECT_EQ(r["requests"]["served"], 8);
  EXPECT_EQ(r["requests"]["rejected"], 0);
  EXPECT_EQ(r["tokens"]["prompt"], 374 + 396 + 879 + 91 + 91 + 381 + 1313 + 388);
  EXPECT_EQ(r["tokens"]["generated"], 44 + 109 + 55 + 16 + 16 + 84 + 142 + 84);
  EXPECT_EQ(r["pages"]["shared"], 0);
  EXPECT_LE(r["pages"]["peak"].get<int>(), 600);
  EXPECT_EQ(r["verify"]["rows"], 40);
  EXPECT_EQ(r["verify"]["values"], 40 * 4 * (32 + 1));
  EXPECT_TRUE(r["verify"]["ok"].get<bool>());
  const auto steps = r["steps"].get<std::uint64_t>();
  const auto lookups = [&](const char* kind) {
    return r["plans"][kind]["hits"].get<std::uint64_t>() + r["plans"][kind]["misses"].get<std::uint64_t>();
  };
  EXPECT_GT(lookups("prefill"), 0U);
  EXPECT_LE(lookups("decode"), steps);  // one plan a step serves every layer
  EXPECT_GT(r["plans"]["decode"]["hits"].get<int>(), 0);
  EXPECT_EQ(lookups("verify"), 0U);
  EXPECT_LE(r["scratch_bytes"]["peak"].get<std::uint64_t>(), r["scratch_bytes"]["required"].get<std::uint64_t>());
  EXPECT_GT(r["tokens_per_second"].get<double>(), 0.0);
  EXPECT_LE(r["step_ms"]["p50"].get<double>(), r["step_ms"]["p99"].get<double>());
}

TEST_F(Program, ReplayPrintsATableForPeople) {
  const Output output = run(std::string("replay ") + kAzureSample + kSmall + "--requests 3 --verify 10");
  EXPECT_EQ(output.code, 0) << output.err;
  for (const char* part :
       {"requests          3 served, 0 rejected, of 300 in the file", "prompt tokens     1649, 0 of them",
        "generated tokens  208", "prefill plans", "decode plans", "decode host time", "planning", "step time",
        "throughput", "verified rows     10, all heads of each: ok", "largest error"}) {
    EXPECT_THAT(output.out, HasSubstr(part));
  }
}

TEST_F(Program, ReplayIsDeterministic) {
  const std::string arguments = std::string("replay ") + kMooncakeSample + kSmall + "--speculate 2 --verify 20";
  nlohmann::json a = results(arguments + " --seed 5");
  nlohmann::json b = results(arguments + " --seed 5");
  for (const char* key : {"tokens", "steps", "pages", "speculation", "plans", "verify"})
    EXPECT_EQ(a[key], b[key]) << key;
  nlohmann::json c = results(arguments + " --seed 6");
  EXPECT_NE(a["speculation"], c["speculation"]);
}

TEST_F(Program, MooncakeTracesShareEqualPrefixes) {
  const nlohmann::json r = results(std::string("replay ") + kMooncakeSample + kSmall + "--max-batch 2 --verify 60");
  EXPECT_EQ(r["form"], "Mooncake JSON lines");
  EXPECT_EQ(r["requests"]["served"], 12);
  EXPECT_GE(r["tokens"]["prompt_shared"].get<int>(),
            10 * 1024);  // everyone's first two blocks, and more in later turns
  EXPECT_EQ(r["tokens"]["prompt_shared"].get<int>(), 16 * r["pages"]["shared"].get<int>());
  EXPECT_TRUE(r["verify"]["ok"].get<bool>());
}

TEST_F(Program, SpeculationRollsBackAndStaysRight) {
  const std::string trace = write("t.csv",
                                  "TIMESTAMP,ContextTokens,GeneratedTokens\n"
                                  "2023-11-16 18:15:46.6805900,20,30\n"
                                  "2023-11-16 18:15:46.7805900,33,17\n");
  const std::string arguments =
      "replay " + trace + kSmall + "--page-size 5 --speculate 3 --verify 1000000 --acceptance ";
  const nlohmann::json some = results(arguments + "0.5");
  EXPECT_EQ(some["tokens"]["generated"], 47);
  EXPECT_TRUE(some["verify"]["ok"].get<bool>());
  EXPECT_GT(some["speculation"]["accepted"].get<int>(), 0);
  EXPECT_LT(some["speculation"]["accepted"].get<int>(), some["speculation"]["proposed"].get<int>());
  EXPECT_GT(some["plans"]["verify"]["misses"].get<int>(), 0);
  EXPECT_EQ(some["plans"]["decode"]["misses"], 0);
  EXPECT_EQ(results(arguments + "0")["speculation"]["accepted"], 0);
  EXPECT_EQ(results(arguments + "1")["steps"], 1 + 8);  // the first token, then 29 by fours
}

// Whether steps are captured changes neither what is computed nor how it is scheduled.
TEST_F(Program, GraphsServeTheSameStepsWithOneCaptureABucket) {
  for (const std::string& windows : {std::string(), std::string("--speculate 4")}) {
    const std::string arguments =
        std::string("replay ") + kAzureSample + kSmall + "--requests 12 --verify 60 --max-batch 5 " + windows;
    const nlohmann::json eager = results(arguments);
    const nlohmann::json r = results(arguments + " --graphs");
    for (const char* key : {"tokens", "steps", "pages", "speculation"}) EXPECT_EQ(r[key], eager[key]) << key;
    EXPECT_TRUE(r["verify"]["ok"].get<bool>());
    EXPECT_EQ(r["verify"]["rows"], 60);
    const nlohmann::json& graphs = r["graphs"];
    EXPECT_EQ(graphs["captures"], 4);  // batches of 1, 2, 4 and 5
    EXPECT_EQ(graphs["guard_trips"], 0);
    EXPECT_EQ(graphs["plans"].get<int>() + graphs["plan_hits"].get<int>(), graphs["replays"].get<int>());
    const nlohmann::json& of_eager = eager["plans"][windows.empty() ? "decode" : "verify"];
    EXPECT_EQ(graphs["replays"].get<int>(), of_eager["hits"].get<int>() + of_eager["misses"].get<int>());
    for (const char* kind : {"decode", "verify"}) {
      EXPECT_EQ(r["plans"][kind]["hits"].get<int>() + r["plans"][kind]["misses"].get<int>(), 0) << kind;
    }
    EXPECT_EQ(r["plans"]["prefill"], eager["plans"]["prefill"]);
    EXPECT_GT(r["decode_host_us"].get<double>(), 0.0);
    EXPECT_GT(eager["decode_host_us"].get<double>(), 0.0);
    EXPECT_FALSE(eager.contains("graphs"));
  }
}

TEST_F(Program, GraphsServeSharedPagesAndEveryElementType) {
  const nlohmann::json shared =
      results(std::string("replay ") + kMooncakeSample + kSmall + "--max-batch 3 --verify 40 --graphs");
  EXPECT_TRUE(shared["verify"]["ok"].get<bool>());
  EXPECT_GT(shared["pages"]["shared"].get<int>(), 0);
  for (const std::string types : {"--dtype fp32 --kv-dtype fp32", "--dtype fp16 --kv-dtype fp8_e4m3"}) {
    const nlohmann::json r =
        results(std::string("replay ") + kAzureSample + kSmall + "--requests 2 --verify 20 --graphs " + types);
    EXPECT_TRUE(r["verify"]["ok"].get<bool>()) << types;
  }
}

TEST_F(Program, GraphsAreInTheTableAndInTheTraceOfTheSteps) {
  const std::string file = path("steps.json");
  const Output output =
      run(std::string("replay ") + kAzureSample + kSmall + "--requests 2 --graphs --trace-out " + file);
  EXPECT_EQ(output.code, 0) << output.err;
  for (const char* part : {"graphs            4 captures, ", "0 guard trips", "decode host time"}) {
    EXPECT_THAT(output.out, HasSubstr(part));
  }
  EXPECT_THAT(output.out, Not(HasSubstr("decode plans")));
  std::map<std::string, int> count;
  const nlohmann::json trace = nlohmann::json::parse(read(file));
  for (const nlohmann::json& event : trace["traceEvents"]) ++count[event["name"].get<std::string>()];
  EXPECT_GT(count["replay"], 0);
  EXPECT_EQ(count["decode"], 0);
  EXPECT_EQ(count["append"], count["prefill"]);
}

TEST_F(Program, GraphsReplayOnADevice) {
  if (results("info")["devices"].size() < 2) GTEST_SKIP() << "skipped: no CUDA device";
  for (const std::string windows : {"", "--speculate 4"}) {
    const nlohmann::json r = results(std::string("replay ") + kAzureSample +
                                     " --device 0 --layers 2 --requests 40 --verify 200 --graphs " + windows);
    EXPECT_TRUE(r["verify"]["ok"].get<bool>()) << r["verify"];
    EXPECT_EQ(r["verify"]["rows"], 200);
    EXPECT_EQ(r["graphs"]["captures"], 6);  // batches of 1 to 32
    EXPECT_EQ(r["graphs"]["guard_trips"], 0);
  }
}

TEST_F(Program, EveryElementTypeReplaysRight) {
  for (const std::string types : {"--dtype fp32 --kv-dtype fp32", "--dtype fp16 --kv-dtype fp16",
                                  "--dtype bf16 --kv-dtype fp8_e4m3", "--dtype fp32 --kv-dtype fp8_e5m2"}) {
    const nlohmann::json r =
        results(std::string("replay ") + kAzureSample + kSmall + "--requests 2 --verify 20 --page-size 7 " + types);
    EXPECT_TRUE(r["verify"]["ok"].get<bool>()) << types;
    EXPECT_EQ(r["verify"]["rows"], 20);
  }
}

TEST_F(Program, RequestsLargerThanThePoolAreRejectedAndCounted) {
  const std::string few = std::string("replay ") + kAzureSample + " --heads 2/1 --head-dim 16 --layers 1 --requests 8 ";
  const Output some = run(few + "--pages 40 --json");
  EXPECT_EQ(some.code, 0);
  EXPECT_EQ(some.json()["requests"]["rejected"], 2);
  EXPECT_EQ(some.json()["requests"]["served"], 6);
  EXPECT_THAT(some.err, StartsWith("rejected: 2 of 8 requests need more than the pool's 40 pages; "
                                   "the first is request 2: 879 + 55 tokens, 59 pages\n"));
  const Output all = run(few + "--pages 2");
  EXPECT_EQ(all.code, 1);
  EXPECT_THAT(all.err, StartsWith("fiw: 8 of 8 requests need more than the pool's 2 pages"));
}

TEST_F(Program, SimulatesTheWholeSampleWithoutAttention) {
  const nlohmann::json r = results(std::string("replay ") + kAzureSample + " --simulate --requests 0");
  EXPECT_EQ(r["requests"]["served"], 300);
  EXPECT_EQ(r["tokens"]["prompt"], 270'000);
  EXPECT_EQ(r["tokens"]["generated"], 76'870);
  EXPECT_FALSE(r.contains("seconds"));
}

TEST_F(Program, MoreThanTheMachineHoldsIsRefusedAtOnce) {
  const std::string largest = std::string("replay ") + kAzureSample + " --pages 268435456 --page-size 1048576";
  const auto begin = std::chrono::steady_clock::now();
  const Output output = run(largest);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_EQ(output.code, 1);
  // 2 layers, 8 heads of 128 two-byte elements, K and V: 2^51 times 4096 bytes.
  EXPECT_THAT(output.err,
              StartsWith("fiw: a cache of 2 layers, 268435456 pages of 1048576 tokens, 8 KV heads of 128 bf16"
                         " elements, with steps of 512 tokens, takes 2305843"));
  EXPECT_THAT(output.err, HasSubstr(" GB, this machine has "));
  const Output steps =
      run(std::string("replay ") + kAzureSample + " --token-budget 1048576 --heads 1024/1024 --dtype fp32");
  EXPECT_EQ(steps.code, 1);
  EXPECT_THAT(steps.err, HasSubstr("with steps of 1048576 tokens"));
}

TEST_F(Program, AFileNameThatIsNotUtf8IsNoFailure) {
  const std::string file = write("t\xff\xfe.csv", read(kAzureSample));
  for (const char* flags : {" --simulate --requests 5", " --requests 1"}) {
    const nlohmann::json r = results("replay '" + file + "'" + kSmall + flags);
    EXPECT_THAT(r["trace"].get<std::string>(), HasSubstr("t\xEF\xBF\xBD\xEF\xBF\xBD.csv")) << flags;
  }
}

TEST_F(Program, WritesATraceOfTheSteps) {
  const std::string file = path("steps.json");
  const nlohmann::json r = results(std::string("replay ") + kAzureSample + kSmall + "--requests 2 --trace-out " + file);
  const nlohmann::json trace = nlohmann::json::parse(read(file));
  std::map<std::string, int> count;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    ++count[event["name"].get<std::string>()];
    if (event["ph"] != "X") continue;
    EXPECT_GE(event["dur"].get<double>(), 0.0);
    EXPECT_GE(event["ts"].get<double>(), 0.0);
  }
  const int steps = r["steps"].get<int>();
  EXPECT_EQ(count["step"], steps);
  EXPECT_EQ(count["plan"], steps);
  EXPECT_EQ(count["pages"], steps);
  EXPECT_EQ(count["append"], count["prefill"] + count["decode"]);
  EXPECT_GT(count["prefill"], 0);
  EXPECT_GT(count["decode"], 0);

  const Output unwritable =
      run(std::string("replay ") + kAzureSample + kSmall + "--requests 1 --trace-out /nonexistent/x");
  EXPECT_EQ(unwritable.code, 1);
  EXPECT_THAT(unwritable.err, StartsWith("fiw: /nonexistent/x: cannot be written"));
}

TEST_F(Program, BadTracesNameFileLineAndFault) {
  const std::string header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  const std::string sample = read(kAzureSample);
  const std::pair<std::string, std::string> cases[] = {
      {"", ":1: the file is empty"},
      {header, ":1: the file holds a header but no request"},
      {header + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,x,109\n",
       ":3: ContextTokens is 'x', expected a whole number from 1"},
      {sample.substr(0, header.size() + 80), ":4: "},
      {"{\"timestamp\": 0, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [1, 2]}\n{\"timest",
       ":2: not a complete JSON object"},
      {"hello\n", ":1: starts with 'hello', expected the header"},
  };
  for (const auto& [text, message] : cases) {
    const std::string file = write("bad", text);
    const Output output = run("replay " + file);
    EXPECT_EQ(output.code, 1);
    EXPECT_THAT(output.err, StartsWith("fiw: " + file + message));
    EXPECT_EQ(output.out, "");
  }
  const Output missing = run("replay " + path("missing.csv"));
  EXPECT_EQ(missing.code, 1);
  EXPECT_THAT(missing.err, HasSubstr("missing.csv: cannot be opened: No such file"));
}

TEST_F(Program, BenchReportsLimitsAndPlanning) {
  const nlohmann::json r = results("bench --filter 'prefill 32/8 D128 4 x 512' --min-time 0");
  ASSERT_EQ(r["shapes"].size(), 1U);
  EXPECT_GT(r["shapes"][0]["read_bandwidth"].get<double>(), 1e8);
  EXPECT_GT(r["shapes"][0]["fma_peak"].get<double>(), 1e8);
  EXPECT_GT(r["shapes"][0]["of_limit"].get<double>(), 0.0);
  EXPECT_LT(r["shapes"][0]["of_limit"].get<double>(), 2.0);
  EXPECT_GT(r["planning"]["miss_seconds"].get<double>(), r["planning"]["hit_seconds"].get<double>());
}

}  // namespace
