# Warnings live on a target that is linked privately, so that consumers of the package never inherit them.
add_library(fiw_warnings INTERFACE)
target_compile_options(fiw_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
  $<$<BOOL:${FIW_WARNINGS_AS_ERRORS}>:-Werror>)
