# Script: builds CONSUMER from scratch, runs it, and checks the line that it prints.
cmake_minimum_required(VERSION 3.25)
set(prefix ${WORK}/prefix)
set(build ${WORK}/${CONSUMER})
set(expected "out 6.20 and 9.00; plans made 1, found 3\n")
file(REMOVE_RECURSE ${build})
file(MAKE_DIRECTORY ${build})

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result STREQUAL "0")
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nfailed with ${result}:\n${output}")
  endif()
endfunction()

function(check_program)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE error)
  if(NOT result STREQUAL "0" OR NOT output STREQUAL expected)
    message(FATAL_ERROR "${ARGN} exited with ${result} and printed\n${output}${error}instead of\n${expected}")
  endif()
endfunction()

function(cmake_consumer project)  # further arguments go to cmake
  run(${CMAKE_COMMAND} -S ${SOURCE}/tests/install/${project} -B ${build} -G ${GENERATOR}
      -D CMAKE_BUILD_TYPE=${BUILD_TYPE} -D CMAKE_PREFIX_PATH=${prefix}
      -D CMAKE_C_COMPILER=${CC} -D CMAKE_CXX_COMPILER=${CXX}
      -D CMAKE_C_COMPILER_LAUNCHER=${LAUNCHER} -D CMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}
      -D FIW_SOURCE=${SOURCE} -D FIW_VERSION=${VERSION} ${ARGN})
  run(${CMAKE_COMMAND} --build ${build})
endfunction()

function(pkg_config_consumer package compiler standard source)
  set(ENV{PKG_CONFIG_PATH} ${prefix}/${LIBDIR}/pkgconfig)
  run(${PKG_CONFIG} --exact-version ${VERSION} ${package})
  execute_process(COMMAND ${PKG_CONFIG} --cflags --libs ${package}
                  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND ${flags})
  run(${compiler} -std=${standard} ${SOURCE}/examples/${source} -o ${build}/program ${flags})
endfunction()

if(CONSUMER STREQUAL "find_package_cpp")
  cmake_consumer(consumer_cpp)
  check_program(${build}/consumer_cpp)
elseif(CONSUMER STREQUAL "find_package_c")
  cmake_consumer(consumer_c)
  check_program(${build}/consumer_c)
elseif(CONSUMER STREQUAL "add_subdirectory")
  cmake_consumer(consumer_subdirectory -D FIW_CUDA=OFF)
  check_program(${build}/consumer_cpp)
  check_program(${build}/consumer_c)
elseif(CONSUMER STREQUAL "pkg_config_cpp")
  pkg_config_consumer(fiw-cpp ${CXX} c++20 decode_step.cc)
  check_program(${build}/program)
elseif(CONSUMER STREQUAL "pkg_config_c")
  pkg_config_consumer(fiw ${CC} c11 decode_step.c)
  check_program(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${prefix}/${LIBDIR} ${build}/program)
else()
  message(FATAL_ERROR "no consumer is called ${CONSUMER}")
endif()
