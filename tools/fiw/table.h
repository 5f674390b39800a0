// Aligned tables for people to read.
#pragma once

#include <cstdint>
#include <iosfwd>
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

}  // namespace fiw::cli
