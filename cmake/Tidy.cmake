# The target `tidy` runs clang-tidy over src/ without src/cuda, kernels for one SIMD target; always, since what it says
# depends on every header.
find_program(CLANG_TIDY_PROGRAM clang-tidy-14)
mark_as_advanced(CLANG_TIDY_PROGRAM)
if(CLANG_TIDY_PROGRAM)
  get_target_property(sources fiw_objects SOURCES)
  list(FILTER sources INCLUDE REGEX "^(core|plan|cpu|capi)/.*[.]cc$")
  foreach(source IN LISTS sources)
    add_custom_command(OUTPUT tidy/${source}
      COMMAND ${CLANG_TIDY_PROGRAM} -p ${PROJECT_BINARY_DIR} --quiet
              --extra-arg=-march=native --extra-arg=-DHWY_COMPILE_ONLY_STATIC ${PROJECT_SOURCE_DIR}/src/${source}
      COMMENT "clang-tidy src/${source}")
    set_source_files_properties(tidy/${source} PROPERTIES SYMBOLIC ON)
    list(APPEND checks tidy/${source})
  endforeach()
  add_custom_target(tidy DEPENDS ${checks})
endif()
