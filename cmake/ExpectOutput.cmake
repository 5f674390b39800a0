# Script: runs COMMAND and fails unless it exits with 0 and prints the line EXPECTED, no more and no less.
execute_process(COMMAND ${COMMAND} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
if(NOT result STREQUAL "0")
  message(FATAL_ERROR "${COMMAND} exited with ${result}\n${output}${error}")
endif()
if(NOT output STREQUAL "${EXPECTED}\n")
  message(FATAL_ERROR "${COMMAND} printed\n${output}instead of\n${EXPECTED}")
endif()
message("${output}")
