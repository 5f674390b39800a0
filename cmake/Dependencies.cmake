# Everything that is found rather than built. Debian package names are in scripts/setup.
find_package(hwy CONFIG REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(dlpack CONFIG REQUIRED)  # fiw.h includes it: public
find_package(fmt CONFIG REQUIRED)     # header-only use: no run-time dependency
if(FIW_SANITIZE)                      # ... but most files then spend most of their time on instrumenting fmt
  set_target_properties(fmt::fmt-header-only PROPERTIES INTERFACE_COMPILE_DEFINITIONS "")
  link_libraries(fmt::fmt)
endif()

if(FIW_BUILD_TOOLS)
  find_package(CLI11 CONFIG REQUIRED)
  find_package(nlohmann_json CONFIG REQUIRED)
endif()
if(FIW_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(FIW_BUILD_BENCHMARKS)
  find_package(benchmark CONFIG REQUIRED)
endif()
