# FlashInfer's kernel headers and the CCCL they are written against, as the target fiw_flashinfer.
#
# They come from the published wheel, pinned by version and hash, through the user's own pip; nothing of it is installed
# or kept outside the build folder. CUDA 13.0's CCCL lacks cuda::fast_mod_div, so the wheel's copy goes first.
set(FLASHINFER_ROOT "" CACHE PATH "An existing copy: a folder with include/, cccl/ and cutlass/, or an unpacked wheel")
set(flashinfer_version 0.7.4)
set(flashinfer_sha256 a051a62e09a2738e8b0de47a1944fd2f0f3eff01b728b662141ea660cb09dd32)

# Sets `result` to the folder under `root` that holds include/flashinfer, or to "".
function(fiw_flashinfer_data root result)
  set(${result} "" PARENT_SCOPE)
  foreach(candidate IN ITEMS ${root} ${root}/data ${root}/flashinfer/data)
    if(EXISTS ${candidate}/include/flashinfer/attention/prefill.cuh AND EXISTS ${candidate}/cccl/libcudacxx/include
       AND EXISTS ${candidate}/cutlass/include)
      set(${result} ${candidate} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

if(FLASHINFER_ROOT)
  fiw_flashinfer_data(${FLASHINFER_ROOT} flashinfer_data)
  if(NOT flashinfer_data)
    message(FATAL_ERROR "FLASHINFER_ROOT is ${FLASHINFER_ROOT}, expected a folder with "
                        "include/flashinfer, cccl/ and cutlass/")
  endif()
else()
  set(flashinfer_unpacked ${PROJECT_BINARY_DIR}/_deps/flashinfer-${flashinfer_version})
  fiw_flashinfer_data(${flashinfer_unpacked} flashinfer_data)
  if(NOT flashinfer_data)
    find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
    set(download ${PROJECT_BINARY_DIR}/_deps/flashinfer-download)
    file(REMOVE_RECURSE ${download} ${flashinfer_unpacked})
    file(WRITE ${download}/requirements.txt
      "flashinfer-python==${flashinfer_version} --hash=sha256:${flashinfer_sha256}\n")
    message(STATUS "Fetching the headers of flashinfer-python ${flashinfer_version} through pip")
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes
              --only-binary=:all: --dest ${download} --requirement ${download}/requirements.txt
      RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
    file(GLOB wheel ${download}/flashinfer_python-${flashinfer_version}-*.whl)
    if(failed OR NOT wheel)
      message(FATAL_ERROR "pip could not fetch flashinfer-python ${flashinfer_version}:\n${output}\n"
                          "Point FLASHINFER_ROOT at an existing copy, or build with -DFIW_CUDA=OFF.")
    endif()
    # Unpacked beside its place and then moved there, so that what was interrupted is not taken for whole.
    file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${download}/unpacked
      PATTERNS "flashinfer/data/include/*" "flashinfer/data/cccl/*" "flashinfer/data/cutlass/*"
               "flashinfer_python-*.dist-info/*")
    file(RENAME ${download}/unpacked ${flashinfer_unpacked})
    file(REMOVE_RECURSE ${download})
    fiw_flashinfer_data(${flashinfer_unpacked} flashinfer_data)
    if(NOT flashinfer_data)
      message(FATAL_ERROR "The wheel of flashinfer-python ${flashinfer_version} holds other folders than expected")
    endif()
  endif()
endif()

add_library(fiw_flashinfer INTERFACE)
target_include_directories(fiw_flashinfer SYSTEM INTERFACE
  ${flashinfer_data}/cccl/libcudacxx/include ${flashinfer_data}/cccl/cub ${flashinfer_data}/cccl/thrust
  ${flashinfer_data}/include ${flashinfer_data}/cutlass/include ${flashinfer_data}/cutlass/tools/util/include)
