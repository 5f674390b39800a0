// The handle of a C++ workspace is a workspace of the C ABI until it is closed.
#include <gtest/gtest.h>

#include "fiw/fiw.h"
#include "fiw/workspace.h"

namespace {

TEST(Handle, ServesTheCAbiUntilClose) {
  const auto workspace = fiw::FlashInferWorkspace::create(-1);
  ASSERT_NE(workspace, nullptr);
  fiw_workspace* handle = workspace->handle();
  ASSERT_NE(handle, nullptr);
  std::int32_t device = 7;
  EXPECT_EQ(fiw_workspace_device_index(handle, &device, nullptr), FIW_OK);
  EXPECT_EQ(device, -1);
  fiw_workspace_stats stats = FIW_WORKSPACE_STATS_INIT;
  EXPECT_EQ(fiw_workspace_get_stats(handle, &stats, nullptr), FIW_OK);
  fiw_workspace_close(handle);
  EXPECT_TRUE(workspace->closed());
  EXPECT_EQ(workspace->handle(), nullptr);
  EXPECT_EQ(fiw_workspace_invalidate_runtime_cache(workspace->handle(), nullptr), FIW_OK);
}

}  // namespace
