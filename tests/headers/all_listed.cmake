# Fails when DIR holds a header that is not in LISTED.
cmake_minimum_required(VERSION 3.25)
file(GLOB found ${DIR}/*.h)
foreach(header IN LISTS found)
  if(NOT header IN_LIST LISTED)
    message(SEND_ERROR "${header} is not in the header set of fiw_static (src/CMakeLists.txt)")
  endif()
endforeach()
