# What `cmake --install` puts where. The tree can be moved: every path in it is relative to the file that holds it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(FIW_INSTALL_CMAKEDIR ${CMAKE_INSTALL_LIBDIR}/cmake/fiw CACHE STRING "Where the CMake package goes")

# Two export sets: a C program can take fiw::c without a C++ compiler or the static library's dependencies.
install(TARGETS fiw_shared EXPORT fiw_c_targets FILE_SET HEADERS)
install(TARGETS fiw_static EXPORT fiw_cpp_targets FILE_SET HEADERS)
install(EXPORT fiw_c_targets FILE fiw-c-targets.cmake NAMESPACE fiw:: DESTINATION ${FIW_INSTALL_CMAKEDIR})
install(EXPORT fiw_cpp_targets FILE fiw-cpp-targets.cmake NAMESPACE fiw:: DESTINATION ${FIW_INSTALL_CMAKEDIR})

configure_package_config_file(cmake/fiw-config.cmake.in ${PROJECT_BINARY_DIR}/fiw-config.cmake
  INSTALL_DESTINATION ${FIW_INSTALL_CMAKEDIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fiw-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fiw-config.cmake ${PROJECT_BINARY_DIR}/fiw-config-version.cmake
  DESTINATION ${FIW_INSTALL_CMAKEDIR})

set(pkgconfig_dir ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pkgconfig_to_libdir ${pkgconfig_dir} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH pkgconfig_to_includedir ${pkgconfig_dir} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
set(pkgconfig_cuda_libs "")
if(FIW_CUDA_ENABLED)  # the toolkit stays where it is
  set(pkgconfig_cuda_libs "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl -lpthread")
endif()
foreach(package IN ITEMS fiw fiw-cpp)
  configure_file(cmake/${package}.pc.in ${PROJECT_BINARY_DIR}/${package}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${package}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
