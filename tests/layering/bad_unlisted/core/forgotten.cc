// A file that is in no CMakeLists.txt, on purpose.
