// Results on stdout: aligned tables for people to read, JSON for programs.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace fiw::cli {

class Table {
 public:
  enum class Align : std::uint8_t { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  /// Without any title, no heading is printed.
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// Exactly one cell a column.
  void add(std::vector<std::string> cells);
  void print(std::ostream& out) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

/// Results as JSON on stdout. Bytes that are not UTF-8, as a file's name may hold, become replacement characters.
void print_json(const nlohmann::json& results);

}  // namespace fiw::cli
