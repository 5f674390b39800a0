package smile.llm.attention;

import java.lang.foreign.Arena;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.ValueLayout;
import java.util.Arrays;
import java.util.Random;

/** Random requests with a query each over a paged cache: attention through the C ABI, and as a loop in double. */
final class Batch {
  private static final double TOLERANCE = 1e-4;

  private final Arena arena;
  private final int pageSize;
  private final int kvHeads;
  private final int heads;
  private final int dim;
  private final int[] lengths;
  private final int[][] pages;
  private final float[] queries;
  private final float[] keys;
  private final float[] values;

  private final MemorySegment outData;
  private final MemorySegment lseData;
  private final MemorySegment out;
  private final MemorySegment lse;
  private final MemorySegment q;
  private final MemorySegment indptr;
  private final MemorySegment kv;
  private final MemorySegment params;
  private final MemorySegment table;
  private final MemorySegment error;

  Batch(Random random, Arena arena) {
    this.arena = arena;
    int batch = 1 + random.nextInt(4);
    pageSize = 1 + random.nextInt(9);
    kvHeads = 1 + random.nextInt(3);
    heads = kvHeads * (1 + random.nextInt(4));
    dim = 8 * (1 + random.nextInt(8));
    lengths = random.ints(batch, 1, 60).toArray();
    int[] counts = Arrays.stream(lengths).map(length -> (length + pageSize - 1) / pageSize).toArray();
    int numPages = Arrays.stream(counts).sum() + random.nextInt(5);
    int[] shuffled = shuffled(random, numPages);
    pages = new int[batch][];
    int taken = 0;
    for (int r = 0; r < batch; ++r) {
      pages[r] = Arrays.copyOfRange(shuffled, taken, taken + counts[r]);
      taken += counts[r];
    }

    keys = new float[numPages * pageSize * kvHeads * dim];
    values = new float[keys.length];
    Arrays.fill(keys, Float.NaN);  // what no request uses stays so
    Arrays.fill(values, Float.NaN);
    for (int r = 0; r < batch; ++r) {
      for (int key = 0; key < lengths[r]; ++key) {
        for (int i = at(r, key, 0); i < at(r, key, kvHeads); ++i) {
          keys[i] = (float) random.nextGaussian();
          values[i] = (float) random.nextGaussian();
        }
      }
    }
    queries = new float[batch * heads * dim];
    for (int i = 0; i < queries.length; ++i) {
      queries[i] = (float) random.nextGaussian();
    }

    outData = arena.allocate(ValueLayout.JAVA_FLOAT, queries.length);
    lseData = arena.allocate(ValueLayout.JAVA_FLOAT, batch * heads);
    out = CAbi.tensor(arena, outData, 2, batch, heads, dim);
    lse = CAbi.tensor(arena, lseData, 2, batch, heads);
    q = CAbi.floats(arena, queries, batch, heads, dim);
    int[] offsets = new int[batch + 1];
    Arrays.setAll(offsets, r -> r);
    indptr = CAbi.ints(arena, offsets);
    kv = CAbi.newKvCache(arena, CAbi.floats(arena, keys, numPages, pageSize, kvHeads, dim),
        CAbi.floats(arena, values, numPages, pageSize, kvHeads, dim));
    params = CAbi.newParams(arena, heads, kvHeads, dim);
    table = CAbi.newPageTable(arena, pageSize, numPages, Arrays.copyOf(shuffled, taken), counts, lengths);
    error = CAbi.newError(arena);
  }

  int decode(MemorySegment workspace) {
    poisonOutputs();
    return CAbi.call("fiw_decode", workspace, q, kv, table, params, out, lse, MemorySegment.NULL, MemorySegment.NULL,
        error);
  }

  int prefill(MemorySegment workspace) {
    poisonOutputs();
    return CAbi.call("fiw_prefill", workspace, q, indptr, kv, table, params, out, lse, MemorySegment.NULL,
        MemorySegment.NULL, error);
  }

  int verify(MemorySegment workspace) {
    poisonOutputs();
    return CAbi.call("fiw_verify", workspace, q, 1, kv, table, params, out, lse, MemorySegment.NULL,
        MemorySegment.NULL, error);
  }

  String message() {
    return CAbi.message(error);
  }

  CAbi.Plans plans(MemorySegment workspace, int scope) {
    return CAbi.plans(arena, workspace, scope);
  }

  /** Compares the outputs of the last call with the loop. */
  void checkOutputs() {
    for (int r = 0; r < lengths.length; ++r) {
      for (int head = 0; head < heads; ++head) {
        int row = r * heads + head;
        double sum = 0.0;
        double[] expected = new double[dim];
        for (int key = 0; key < lengths[r]; ++key) {
          int at = at(r, key, head / (heads / kvHeads));
          double logit = 0.0;
          for (int i = 0; i < dim; ++i) {
            logit += (double) queries[row * dim + i] * keys[at + i];
          }
          double weight = Math.exp(logit / Math.sqrt(dim));
          sum += weight;
          for (int i = 0; i < dim; ++i) {
            expected[i] += weight * values[at + i];
          }
        }
        checkClose(Math.log(sum), lseData.getAtIndex(ValueLayout.JAVA_FLOAT, row), "lse", r, head, 0);
        for (int i = 0; i < dim; ++i) {
          float actual = outData.getAtIndex(ValueLayout.JAVA_FLOAT, (long) row * dim + i);
          checkClose(expected[i] / sum, actual, "out", r, head, i);
        }
      }
    }
  }

  private static void checkClose(double expected, float actual, String what, int request, int head, int element) {
    boolean close = Math.abs(actual - expected) <= TOLERANCE * (1.0 + Math.abs(expected));  // false for NaN
    FlashInferWorkspaceTest.expect(close,
        what + "[" + request + "][" + head + "][" + element + "] is " + actual + ", expected " + expected);
  }

  private void poisonOutputs() {
    for (MemorySegment data : new MemorySegment[] {outData, lseData}) {
      for (long i = 0; i < data.byteSize() / Float.BYTES; ++i) {
        data.setAtIndex(ValueLayout.JAVA_FLOAT, i, Float.NaN);
      }
    }
  }

  /** Where a key of a request lies: [page, slot, head, 0]. */
  private int at(int request, int key, int kvHead) {
    int slot = pages[request][key / pageSize] * pageSize + key % pageSize;
    return (slot * kvHeads + kvHead) * dim;
  }

  private static int[] shuffled(Random random, int count) {
    int[] numbers = new int[count];
    for (int i = 0; i < count; ++i) {
      int j = random.nextInt(i + 1);
      numbers[i] = numbers[j];
      numbers[j] = i;
    }
    return numbers;
  }
}
