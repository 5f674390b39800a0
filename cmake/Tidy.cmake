# The target `tidy` runs clang-tidy over the host-only layers; always, since what it says depends on every header.
find_program(CLANG_TIDY_PROGRAM NAMES clang-tidy-14 clang-tidy)
mark_as_advanced(CLANG_TIDY_PROGRAM)
if(CLANG_TIDY_PROGRAM)
  get_target_property(sources fiw_objects SOURCES)
  list(FILTER sources INCLUDE REGEX "^(core|plan|capi)/")
  foreach(source IN LISTS sources)
    add_custom_command(OUTPUT tidy/${source}
      COMMAND ${CLANG_TIDY_PROGRAM} -p ${PROJECT_BINARY_DIR} --quiet ${PROJECT_SOURCE_DIR}/src/${source}
      COMMENT "clang-tidy src/${source}")
    set_source_files_properties(tidy/${source} PROPERTIES SYMBOLIC ON)
    list(APPEND checks tidy/${source})
  endforeach()
  add_custom_target(tidy DEPENDS ${checks})
endif()
