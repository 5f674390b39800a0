# FIW_SANITIZE instruments every target of the build. A finding ends the program, so that no test passes in spite of one.
if(FIW_SANITIZE)
  add_compile_options(-fsanitize=${FIW_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${FIW_SANITIZE})

  # What the run times must know. ctest reads it, however it is started.
  set(sanitizer_environment
    "set(ENV{ASAN_OPTIONS} detect_stack_use_after_return=1:strict_string_checks=1)\n"
    "set(ENV{UBSAN_OPTIONS} print_stacktrace=1)\n")
  if(FIW_SANITIZE MATCHES "thread")
    # Tells the sanitizer about OpenMP's barriers; without it, whatever a barrier orders looks like a race. It is not
    # where the loader looks, and libomp says nothing when it finds none.
    find_library(FIW_ARCHER archer PATHS /usr/lib/llvm-14/lib REQUIRED)
    mark_as_advanced(FIW_ARCHER)
    list(APPEND sanitizer_environment
      "set(ENV{OMP_TOOL_LIBRARIES} ${FIW_ARCHER})\n"
      "set(ENV{TSAN_OPTIONS} ignore_noninstrumented_modules=1)\n")
  endif()
  file(WRITE ${PROJECT_BINARY_DIR}/sanitizer_environment.cmake ${sanitizer_environment})
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${PROJECT_BINARY_DIR}/sanitizer_environment.cmake)
endif()
