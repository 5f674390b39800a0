// See error.h.
#include "error.h"

#include <cstring>

namespace fiw::python {

namespace nb = nanobind;

void raise(const fiw_error& error) {
  const nb::object exception = nb::module_::import_("fiw.errors")
                                   .attr("from_fields")(static_cast<int>(error.code), static_cast<int>(error.reason),
                                                        static_cast<const char*>(error.message), error.index,
                                                        error.bytes_required, error.backend_code);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

void raise_invalid(fiw_reason reason, const char* message) {
  fiw_error error = FIW_ERROR_INIT;
  error.code = FIW_INVALID_ARGUMENT;
  error.reason = reason;
  std::strncpy(error.message, message, sizeof(error.message) - 1);
  raise(error);
}

}  // namespace fiw::python
