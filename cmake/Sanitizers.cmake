# FIW_SANITIZE instruments every target of the build. A finding ends the program, so that no test passes in spite of one.
if(FIW_SANITIZE)
  add_compile_options(-fsanitize=${FIW_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${FIW_SANITIZE})
endif()
