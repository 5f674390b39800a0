/* The whole test framework of the C tests: count, say where, go on. */
#ifndef FIW_TESTS_CAPI_CHECK_H_
#define FIW_TESTS_CAPI_CHECK_H_

#include <stdio.h>

extern int checks_passed;
extern int checks_failed;

#define CHECK(condition)                                             \
  do {                                                               \
    if (condition) {                                                 \
      ++checks_passed;                                               \
    } else {                                                         \
      ++checks_failed;                                               \
      printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                \
  } while (0)

/* A call that must succeed and leave `err` clean. */
#define CHECK_OK(call, err)                                                                                         \
  do {                                                                                                              \
    const fiw_status status_ = (call);                                                                              \
    if (status_ == FIW_OK && (err).code == FIW_OK && (err).reason == FIW_REASON_NONE && (err).message[0] == '\0') { \
      ++checks_passed;                                                                                              \
    } else {                                                                                                        \
      ++checks_failed;                                                                                              \
      printf("%s:%d: %s: %d %s\n", __FILE__, __LINE__, #call, (int)status_, (err).message);                         \
    }                                                                                                               \
  } while (0)

/* A call that must fail with this status and reason, and say `text`. */
#define CHECK_FAILS(call, err, status, why, text)                                                                 \
  do {                                                                                                            \
    const fiw_status status_ = (call);                                                                            \
    if (status_ == (status) && (err).code == (status) && (err).reason == (why) &&                                 \
        strstr((err).message, (text)) != NULL) {                                                                  \
      ++checks_passed;                                                                                            \
    } else {                                                                                                      \
      ++checks_failed;                                                                                            \
      printf("%s:%d: %s: got %d, reason %d, \"%s\"; expected %d, reason %d, \"%s\"\n", __FILE__, __LINE__, #call, \
             (int)status_, (int)(err).reason, (err).message, (int)(status), (int)(why), (text));                  \
    }                                                                                                             \
  } while (0)

#endif
