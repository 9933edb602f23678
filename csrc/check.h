// The one macro for internal invariants of code that knows no torch.
//
// Arguments of users are checked in Python, where the message can name the op and the argument. What fails here is a
// bug of this package; the message says where.
#pragma once

#include <stdexcept>

#define MX_STRINGIFY_(x) #x
#define MX_STRINGIFY(x) MX_STRINGIFY_(x)
#define MX_CHECK(condition, message)                                                                  \
    do {                                                                                              \
        if (!(condition))                                                                             \
            throw std::logic_error("mxfp4_ops internal error: " message " (" #condition ", " __FILE__ \
                                   ":" MX_STRINGIFY(__LINE__) ")");                                   \
    } while (0)
