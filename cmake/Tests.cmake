# How a GoogleTest program becomes ctest entries: one entry a test case, named <program>.<Suite>.<Case>.
include(GoogleTest)

# fiw_add_test(<name> LABEL <label> SOURCES <file>... [LIBRARIES <target>...] [TIMEOUT <seconds>])
#
# Links the static library, so that tests reach internals through src/ as well as the public headers. The target
# tests_<label> builds all programs of a label.
function(fiw_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABEL;TIMEOUT" "SOURCES;LIBRARIES")
  if(NOT arg_LABEL OR NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "fiw_add_test(${name}) needs LABEL and SOURCES; got ${ARGN}")
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
    if(FIW_SANITIZE)
      set(arg_TIMEOUT 900)
    endif()
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE
    fiw_warnings fiw::fiw hwy::hwy OpenMP::OpenMP_CXX fmt::fmt-header-only GTest::gtest_main ${arg_LIBRARIES})
  if(FIW_SANITIZE)  # fewer random rounds; and optimising a test program would take longer than it saves
    target_compile_definitions(${name} PRIVATE FIW_SANITIZED)
    target_compile_options(${name} PRIVATE -O0)
  endif()
  # Passive: tests run side by side, and a thread that waits for its team must not keep a core from another test.
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST NO_PRETTY_VALUES TEST_PREFIX ${name}.
                       PROPERTIES LABELS ${arg_LABEL} TIMEOUT ${arg_TIMEOUT} ENVIRONMENT OMP_WAIT_POLICY=passive)
  if(NOT TARGET tests_${arg_LABEL})
    add_custom_target(tests_${arg_LABEL})
  endif()
  add_dependencies(tests_${arg_LABEL} ${name})
endfunction()

# fiw_add_output_test(<name> LABEL <label> EXPECTED <line> COMMAND <command>...)
#
# Passes when the command exits with 0 and prints exactly that line.
function(fiw_add_output_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABEL;EXPECTED" "COMMAND")
  if(NOT arg_LABEL OR NOT arg_EXPECTED OR NOT arg_COMMAND OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "fiw_add_output_test(${name}) needs LABEL, EXPECTED and COMMAND; got ${ARGN}")
  endif()
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} "-DEXPECTED=${arg_EXPECTED}" "-DCOMMAND=${arg_COMMAND}"
                                -P ${PROJECT_SOURCE_DIR}/cmake/ExpectOutput.cmake)
  set_tests_properties(${name} PROPERTIES LABELS ${arg_LABEL} TIMEOUT 120)
endfunction()
