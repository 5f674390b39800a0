// See error.h.
#include "error.h"

#include <cstring>
#include <utility>

namespace fiw::python {

namespace nb = nanobind;

namespace {

// A plain pointer: the end of a thread is no place to give up a reference.
thread_local PyObject* cause = nullptr;

}  // namespace

void blame(nb::object exception) { Py_XSETREF(cause, exception.release().ptr()); }

void raise(const fiw_error& error) {
  const nb::object exception = nb::module_::import_("fiw.errors")
                                   .attr("from_fields")(static_cast<int>(error.code), static_cast<int>(error.reason),
                                                        static_cast<const char*>(error.message), error.index,
                                                        error.bytes_required, error.backend_code);
  if (error.code == FIW_OUT_OF_MEMORY) PyException_SetCause(exception.ptr(), std::exchange(cause, nullptr));
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
