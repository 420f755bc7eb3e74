// A data source that asks Prometheus itself: Grafana's own one asks through a Grafana server. The frames are of the
// same shape: a field of times and one of values for each series; of a table, a field for each label.
import * as D from '@grafana/data';
import * as S from '@grafana/scenes';

const POINTS = 300; // of a series over the range
const FILLED_IN = { $__rate_interval: '5s', $__range: '1h', $__interval: '1s' };

/** The data of Prometheus's answer; throws its error with the query that caused it. */
async function ask(path, params) {
  const answer = await (await fetch(`${window.RENDER.prometheus}/api/v1/${path}?${new URLSearchParams(params)}`)).json();
  if (answer.status !== 'success') throw new Error(`${answer.error}: ${JSON.stringify(params)}`);
  return answer.data;
}

/** A value's text as Prometheus writes it, such as "+Inf" or "NaN". */
function number(text) {
  return Number(text.replace('Inf', 'Infinity'));
}

/** The expression with the scene's variables put in: of many values, as alternatives of a regular expression. */
function filledIn(expr, scopedVars) {
  const scene = scopedVars?.__sceneObject?.value?.valueOf();
  const known = Object.entries(FILLED_IN).reduce((text, [name, value]) => text.replaceAll(name, value), expr);
  const alternatives = (value) => (Array.isArray(value) ? `(${value.join('|')})` : String(value));
  return scene ? S.sceneGraph.interpolate(scene, known, scopedVars, alternatives) : known;
}

function nameOf(query, labels) {
  if (!query.legendFormat) return undefined;
  return query.legendFormat.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');
}

function lines(query, series) {
  return series.map(({ metric, values, value }) => {
    const points = values ?? [value];
    const config = { displayNameFromDS: nameOf(query, metric) };
    return D.toDataFrame({
      refId: query.refId,
      fields: [
        { name: 'Time', type: D.FieldType.time, values: points.map(([time]) => time * 1000) },
        { name: 'Value', type: D.FieldType.number, labels: metric, config, values: points.map((at) => number(at[1])) },
      ],
    });
  });
}

function table(query, series, alone) {
  const labels = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))].sort();
  return D.toDataFrame({
    refId: query.refId,
    fields: [
      { name: 'Time', type: D.FieldType.time, values: series.map(({ value }) => value[0] * 1000) },
      ...labels.map((name) => ({
        name,
        type: D.FieldType.string,
        values: series.map(({ metric }) => metric[name] ?? ''),
      })),
      {
        name: alone ? 'Value' : `Value #${query.refId}`,
        type: D.FieldType.number,
        values: series.map(({ value }) => number(value[1])),
      },
    ],
  });
}

export class Prometheus extends S.RuntimeDataSource {
  async query({ targets, range, scopedVars }) {
    const [start, end] = [range.from.valueOf() / 1000, range.to.valueOf() / 1000];
    const step = Math.max(1, (end - start) / POINTS);
    const frames = targets.map(async (target) => {
      const query = filledIn(target.expr, scopedVars);
      const { result } = target.instant
        ? await ask('query', { query, time: end })
        : await ask('query_range', { query, start, end, step });
      return target.format === 'table' ? [table(target, result, targets.length === 1)] : lines(target, result);
    });
    return { data: (await Promise.all(frames)).flat(), state: D.LoadingState.Done };
  }

  async metricFindQuery(query, { scopedVars } = {}) {
    const [, selector, label] = /^label_values\((.+), (\w+)\)$/.exec(query.query ?? query);
    const values = await ask(`label/${label}/values`, { 'match[]': filledIn(selector, scopedVars) });
    return values.map((text) => ({ text }));
  }

  async testDatasource() {
    return { status: 'success' };
  }
}
