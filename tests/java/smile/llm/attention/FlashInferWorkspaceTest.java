package smile.llm.attention;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SymbolLookup;
import java.util.Arrays;
import java.util.Random;

/**
 * Tests of {@link FlashInferWorkspace}: its own methods, and its handle in downcalls of the C ABI. Prints each result;
 * exits with 1 if one fails. The system property {@code fiw.library} names the library, an argument the seed.
 */
public final class FlashInferWorkspaceTest {
  private static final int CPU = -1;

  private static String libraryFile;
  private static long seed;
  private static int passed;
  private static int failed;

  private interface Test {
    void run() throws Exception;
  }

  /**
   * Runs all tests.
   *
   * @param arguments the seed, or nothing for a new one
   */
  public static void main(String[] arguments) {
    libraryFile = System.getProperty("fiw.library");
    if (libraryFile == null) {
      throw new IllegalArgumentException("fiw.library is not set, expected the path of libfiw.so");
    }
    seed = arguments.length > 0 ? Long.parseLong(arguments[0]) : System.nanoTime();
    System.out.println("seed " + seed);
    test("what is no library is refused", FlashInferWorkspaceTest::noLibrary);  // first: what is loaded stays loaded
    test("without a library there is no workspace", FlashInferWorkspaceTest::missingLibrary);
    test("no CUDA backend, no workspace", FlashInferWorkspaceTest::unavailable);
    test("bad arguments are named", FlashInferWorkspaceTest::badArguments);
    test("decode equals a loop", FlashInferWorkspaceTest::decodeEqualsLoop);
    test("each invalidation drops its scope", FlashInferWorkspaceTest::invalidationScopes);
    test("a closed workspace is harmless", FlashInferWorkspaceTest::closed);
    System.out.println(passed + " passed, " + failed + " failed");
    System.exit(failed == 0 ? 0 : 1);
  }

  private static void test(String name, Test test) {
    try {
      test.run();
      ++passed;
      System.out.println("ok      " + name);
    } catch (Throwable e) {
      ++failed;
      System.out.println("FAILED  " + name + " (seed " + seed + ")");
      e.printStackTrace(System.out);
    }
  }

  private static void noLibrary() {
    try {
      System.setProperty("fiw.library", "/no/such/library.so");
      expectRefusal(IllegalArgumentException.class, "fiw.library is /no/such/library.so", CPU, 0);
    } finally {
      System.setProperty("fiw.library", libraryFile);
    }
  }

  private static void missingLibrary() {
    try {
      SymbolLookup.libraryLookup("libfiw.so.0", Arena.global());
      System.out.println("skipped: this machine has libfiw.so.0 on the loader's path");
      return;
    } catch (IllegalArgumentException e) {
      System.clearProperty("fiw.library");
    }
    try {
      expect(FlashInferWorkspace.create(CPU, 0) == null, "a workspace without a library");
    } finally {
      System.setProperty("fiw.library", libraryFile);
    }
  }

  private static void unavailable() {
    if (CAbi.call("fiw_compiled_with", CAbi.CUDA) != 0) {
      System.out.println("skipped: this library has the CUDA backend");
      return;
    }
    expect(FlashInferWorkspace.create(0, 0) == null, "a workspace on a device without a backend");
  }

  private static void badArguments() {
    expectRefusal(IllegalArgumentException.class, "workspaceBytes is -1, expected", CPU, -1);
    expectRefusal(IllegalStateException.class, "NO_DEVICE: device_index is -2, expected", -2, 0);
    expectRefusal(IllegalStateException.class, "OUT_OF_MEMORY: ", CPU, Long.MAX_VALUE);
  }

  private static void decodeEqualsLoop() {
    Random random = new Random(seed);
    for (int i = 0; i < 30; ++i) {
      int layers = 1 + random.nextInt(4);
      try (FlashInferWorkspace workspace = FlashInferWorkspace.create(CPU, 0);
          Arena arena = Arena.ofConfined()) {
        Batch batch = new Batch(random, arena);
        for (int layer = 0; layer < layers; ++layer) {
          expectStatus(CAbi.OK, batch.decode(workspace.handle()), batch);
          batch.checkOutputs();
        }
        CAbi.Plans plans = batch.plans(workspace.handle(), CAbi.DECODE);
        expect(plans.made() == 1 && plans.found() == layers - 1, layers + " layers, " + plans);
      }
    }
  }

  private static void invalidationScopes() {
    try (FlashInferWorkspace workspace = FlashInferWorkspace.create(CPU, 1 << 20);
        Arena arena = Arena.ofConfined()) {
      Batch batch = new Batch(new Random(seed), arena);
      runAll(batch, workspace);
      expectHeld(batch, workspace, 1, 1, 1);
      workspace.invalidateVerifyRuntimeCache();
      expectHeld(batch, workspace, 1, 1, 0);
      runAll(batch, workspace);
      expectHeld(batch, workspace, 1, 1, 1);
      workspace.invalidatePrefillRuntimeCache();
      expectHeld(batch, workspace, 1, 0, 1);
      runAll(batch, workspace);
      expectHeld(batch, workspace, 1, 1, 1);
      workspace.invalidateRuntimeCache();
      expectHeld(batch, workspace, 0, 0, 1);
      runAll(batch, workspace);
    }
  }

  private static void closed() {
    FlashInferWorkspace workspace = FlashInferWorkspace.create(CPU, 0);
    expect(!workspace.handle().equals(MemorySegment.NULL), "an open workspace has a handle");
    workspace.close();
    workspace.close();
    expect(workspace.handle().equals(MemorySegment.NULL), "a closed workspace has none");
    workspace.invalidateRuntimeCache();
    workspace.invalidatePrefillRuntimeCache();
    workspace.invalidateVerifyRuntimeCache();
    try (Arena arena = Arena.ofConfined()) {
      Batch batch = new Batch(new Random(seed), arena);
      expectStatus(CAbi.INVALID_ARGUMENT, batch.decode(workspace.handle()), batch);
    }
  }

  // With one query a request, the three calls compute the same.
  private static void runAll(Batch batch, FlashInferWorkspace workspace) {
    expectStatus(CAbi.OK, batch.decode(workspace.handle()), batch);
    batch.checkOutputs();
    expectStatus(CAbi.OK, batch.prefill(workspace.handle()), batch);
    batch.checkOutputs();
    expectStatus(CAbi.OK, batch.verify(workspace.handle()), batch);
    batch.checkOutputs();
  }

  private static void expectHeld(Batch batch, FlashInferWorkspace workspace, long... expected) {
    long[] held = new long[3];
    for (int scope = CAbi.DECODE; scope <= CAbi.VERIFY; ++scope) {
      held[scope] = batch.plans(workspace.handle(), scope).held();
    }
    expect(Arrays.equals(held, expected),
        "decode, prefill and verify plans: " + Arrays.toString(held) + ", expected " + Arrays.toString(expected));
  }

  private static void expectStatus(int expected, int status, Batch batch) {
    expect(status == expected, "status " + status + ": " + batch.message());
  }

  static void expect(boolean condition, String otherwise) {
    if (!condition) {
      throw new AssertionError(otherwise);
    }
  }

  private static void expectRefusal(
      Class<? extends RuntimeException> type, String message, int deviceIndex, long workspaceBytes) {
    try (FlashInferWorkspace workspace = FlashInferWorkspace.create(deviceIndex, workspaceBytes)) {
      throw new AssertionError("not refused: " + workspace);
    } catch (RuntimeException e) {
      expect(type.isInstance(e) && e.getMessage().startsWith(message), e.toString());
    }
  }
}
