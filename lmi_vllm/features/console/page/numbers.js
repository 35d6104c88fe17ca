// From cumulative counts to what a person asks: how many a second, and how long.

/** What was counted between two states, for each second; null where it cannot be told. */
export function rate(now, before, name) {
  if (!before || now.counters[name] === undefined) return null;
  const span = now.time - before.time;
  const more = now.counters[name] - (before.counters[name] ?? 0);
  return span > 0 && more >= 0 ? more / span : null; // fewer: the server was restarted
}

/** The quantile of what a histogram observed between two states, in seconds; null without any. */
export function quantile(now, before, name, share) {
  const rows = now.histograms[name];
  if (!rows) return null;
  const old = new Map(before?.histograms[name]?.map(([bound, count]) => [bound, count]) ?? []);
  const counts = rows.map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const all = counts[counts.length - 1][1];
  if (!(all > 0)) return null;
  const wanted = share * all;
  let [low, passed] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= wanted) {
      if (bound === null) return low; // beyond the last bound: at least that
      return low + ((bound - low) * (wanted - passed)) / Math.max(count - passed, 1e-9);
    }
    [low, passed] = [bound ?? low, count];
  }
  return low;
}
