// Draws a dashboard with Grafana's own components and the data of a real Prometheus.
//
//   index.html?dashboard=dash.json&prometheus=http://127.0.0.1:9090&range=900&scrape=15&var-job_id=42
//
// It knows rows, the panel types of `draw`, instant and range queries, tables with
// transformations, and annotations whose value is their time. When every panel is drawn the
// document's title is "ready", else it begins with "error".
import React from 'react';
import { createRoot } from 'react-dom/client';
import * as data from '@grafana/data';
import * as ui from '@grafana/ui';

const args = new URLSearchParams(location.search);
const end = Number(args.get('end') || Math.floor(Date.now() / 1000));
const range = Number(args.get('range') || 900);
const scrape = Number(args.get('scrape') || 15);
const step = Math.max(scrape, Math.ceil(range / 500));
const width = Number(args.get('width') || 1400);
const theme = data.createTheme({ colors: { mode: args.get('theme') || 'dark' } });

// Grafana's grid: 24 columns, 30 pixels a row and 8 between panels.
const GAP = 8;
const COLUMN = (width - GAP) / 24;
const LINE = 38;

const BUILT_IN = {
  __rate_interval: `${Math.max(4 * scrape, step + scrape)}s`,
  __interval: `${step}s`,
  __range: `${range}s`,
  datasource: 'preview',
};
const replace = (text) =>
  String(text).replace(/\$\{?(\w+)(?::\w+)?\}?/g, (_, name) => BUILT_IN[name] ?? args.get(`var-${name}`) ?? '.*');

// Properties that overrides may set, as the table panel registers them in Grafana.
const settable = (id, path = id) => ({
  id, path, name: id, isCustom: false, shouldApply: () => true, process: (value) => value, editor: () => null, override: () => null,
});
const registry = new data.FieldConfigOptionsRegistry(() =>
  ['unit', 'decimals', 'min', 'max', 'mappings', 'displayName', 'noValue', 'color', 'thresholds'].map((id) => settable(id)));
data.standardTransformersRegistry.setInit(() =>
  [data.standardTransformers.mergeTransformer, data.standardTransformers.organizeFieldsTransformer].map((transformation) => ({
    id: transformation.id, name: transformation.name, transformation: async () => transformation, editor: () => null,
  })));

async function ask(target) {
  const expression = replace(target.expr);
  const moment = target.instant ? { time: end } : { start: end - range, end, step };
  const path = target.instant ? 'query' : 'query_range';
  const form = new URLSearchParams({ query: expression, ...moment });
  const answer = await (await fetch(`${args.get('prometheus')}/api/v1/${path}?${form}`)).json();
  if (answer.status !== 'success') throw new Error(`${answer.error} in ${expression}`);
  return answer.data.result.map((series) => ({ labels: series.metric, values: series.values ?? [series.value] }));
}

const legend = (target, labels) =>
  !target.legendFormat || target.legendFormat === '__auto'
    ? JSON.stringify(labels)
    : target.legendFormat.replace(/{{\s*(\w+)\s*}}/g, (_, name) => labels[name] ?? '');

const number = (text) => (text === 'NaN' ? NaN : text.endsWith('Inf') ? (text.startsWith('-') ? -Infinity : Infinity) : Number(text));

function lineFrames(target, series) {
  return series.map(({ labels, values }) =>
    data.toDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: data.FieldType.time, values: values.map(([time]) => time * 1000), config: { interval: step * 1000 } },
        { name: 'Value', type: data.FieldType.number, values: values.map(([, value]) => number(value)), labels,
          config: { displayNameFromDS: legend(target, labels) } },
      ],
    }));
}

function tableFrame(target, series, several) {
  const names = [...new Set(series.flatMap(({ labels }) => Object.keys(labels)))].sort();
  return data.toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: data.FieldType.time, values: series.map(({ values }) => values[0][0] * 1000) },
      ...names.map((name) => ({ name, type: data.FieldType.string, values: series.map(({ labels }) => labels[name] ?? '') })),
      { name: several ? `Value #${target.refId}` : 'Value', type: data.FieldType.number,
        values: series.map(({ values }) => number(values[0][1])) },
    ],
  });
}

async function load(panel) {
  const targets = panel.targets ?? [];
  const answers = await Promise.all(targets.map(ask));
  let frames = targets.flatMap((target, i) =>
    target.format === 'table'
      ? answers[i].length ? [tableFrame(target, answers[i], answers.filter((a) => a.length).length > 1)] : []
      : lineFrames(target, answers[i]));
  if (panel.transformations?.length) {
    frames = await new Promise((resolve, reject) =>
      data.transformDataFrame(panel.transformations, frames).subscribe({ next: resolve, error: reject }));
  }
  const defaults = panel.fieldConfig?.defaults ?? {};
  const steps = (defaults.thresholds?.steps ?? [{ color: 'text', value: null }])
    .map(({ color, value }) => ({ color, value: value ?? -Infinity }));
  return data.applyFieldOverrides({
    data: frames,
    fieldConfig: { defaults: { ...defaults, thresholds: { mode: 'absolute', steps } }, overrides: panel.fieldConfig?.overrides ?? [] },
    fieldConfigRegistry: registry, replaceVariables: replace, theme, timeZone: 'utc',
  }).map((frame) => {
    // What a panel type adds to a field (drawing style, stacking) is not in the registry above.
    frame.fields.forEach((field) => { field.config.custom = { ...defaults.custom, ...field.config.custom }; });
    return frame;
  });
}

const marks = [];
async function loadMarks(annotations) {
  for (const { expr, iconColor, useValueForTime, enable } of annotations) {
    if (!enable || !useValueForTime) continue;
    for (const { values } of await ask({ expr })) {
      for (const time of new Set(values.map(([, value]) => Number(value)))) marks.push({ time, color: theme.visualization.getColorByName(iconColor) });
    }
  }
}

function drawMarks(config) {
  config.addHook('draw', (plot) => {
    const { ctx, bbox } = plot;
    for (const { time, color } of marks) {
      const x = plot.valToPos(time, 'x', true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = color;
      ctx.setLineDash([4, 4]);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.beginPath(); ctx.moveTo(x - 5, bbox.top + bbox.height + 6); ctx.lineTo(x + 5, bbox.top + bbox.height + 6);
      ctx.lineTo(x, bbox.top + bbox.height); ctx.fill();
      ctx.restore();
    }
  });
}

const Note = ({ children }) => <div style={{ padding: 16, color: theme.colors.text.secondary }}>{children}</div>;

function Table({ frame, sortBy }) {
  const sorter = sortBy?.length && frame.fields.findIndex((field) => data.getFieldDisplayName(field, frame) === sortBy[0].displayName);
  const shown = sortBy?.length && sorter >= 0 ? data.sortDataFrame(frame, sorter, sortBy[0].desc) : frame;
  return <Rows frame={shown} />;
}

function Rows({ frame }) {
  const cell = { padding: '3px 8px', textAlign: 'left', borderBottom: `1px solid ${theme.colors.border.weak}`, whiteSpace: 'nowrap' };
  return (
    <table style={{ width: '100%', fontSize: 13, borderCollapse: 'collapse' }}>
      <thead><tr>{frame.fields.map((field) => <th key={field.name} style={cell}>{data.getFieldDisplayName(field, frame)}</th>)}</tr></thead>
      <tbody>{Array.from({ length: frame.length }, (_, row) => (
        <tr key={row}>{frame.fields.map((field) => {
          const shown = field.display(field.values[row]);
          return <td key={field.name} style={{ ...cell, color: field.config.mappings?.length ? shown.color : undefined }}>{data.formattedValueToString(shown)}</td>;
        })}</tr>))}
      </tbody>
    </table>
  );
}

function draw(panel, frames, w, h) {
  const unknown = panel.fieldConfig?.defaults?.noValue;
  const shown = () => data.getFieldDisplayValues({
    data: frames, fieldConfig: { defaults: {}, overrides: [] }, theme, timeZone: 'utc', replaceVariables: replace,
    reduceOptions: { calcs: panel.options?.reduceOptions?.calcs ?? ['lastNotNull'], values: false },
  });
  const filled = frames.filter((frame) => frame.length > 0);
  switch (panel.type) {
    case 'timeseries': {
      if (!filled.length) return <Note>{unknown || 'No data'}</Note>;
      const timeRange = { from: data.dateTime((end - range) * 1000), to: data.dateTime(end * 1000), raw: { from: `now-${range}s`, to: 'now' } };
      return (
        <ui.TimeSeries frames={filled} width={w} height={h} timeZone="utc" timeRange={timeRange} options={{}}
          legend={{ displayMode: 'list', placement: 'bottom', calcs: [], showLegend: true, ...panel.options?.legend }}>
          {(config) => { drawMarks(config); return null; }}
        </ui.TimeSeries>
      );
    }
    case 'stat': {
      if (!filled.length) return <ui.BigValue theme={theme} value={{ text: unknown || 'No data', numeric: NaN }} width={w} height={h} colorMode="none" graphMode="none" />;
      const values = shown();
      return (
        <div style={{ display: 'flex' }}>
          {values.map(({ display }, i) => (
            <ui.BigValue key={i} theme={theme} value={display} width={w / values.length} height={h} graphMode="none" justifyMode="auto"
              colorMode={panel.options?.colorMode ?? 'value'} textMode={panel.options?.textMode ?? 'auto'} />))}
        </div>
      );
    }
    case 'gauge':
    case 'bargauge': {
      if (!filled.length) return <Note>{unknown || 'No data'}</Note>;
      const values = shown();
      const each = Math.min(h / values.length - 4, panel.type === 'gauge' ? h : 48);
      const aligned = data.getDisplayValueAlignmentFactors(values);
      return values.map(({ display, field }, i) => (
        <div key={i} style={{ marginBottom: 4 }}>
          <ui.BarGauge theme={theme} value={values.length > 1 || panel.type === 'bargauge' ? display : { ...display, title: undefined }} field={field} width={w} height={each}
            orientation="horizontal" alignmentFactors={panel.type === 'bargauge' ? aligned : undefined} displayMode={panel.options?.displayMode ?? 'basic'} showUnfilled />
        </div>));
    }
    case 'table':
      return filled.length ? <Table frame={filled[0]} sortBy={panel.options?.sortBy} /> : <Note>{unknown || 'No data'}</Note>;
    default:
      throw new Error(`a panel of type ${panel.type} is not drawn by the preview`);
  }
}

class Guard extends React.Component {
  state = {};
  componentDidCatch(error) { this.setState({ error }); this.props.onError(error); }
  render() { return this.state.error ? <Note>{String(this.state.error)}</Note> : this.props.children; }
}

let waiting = 0;
function finished(panel, error) {
  waiting -= 1;
  if (error) document.title = `error: ${panel.title}: ${error.message}`;
  else if (waiting === 0 && !document.title.startsWith('error')) document.title = 'ready';
}

function Panel({ panel, w, h }) {
  const [frames, setFrames] = React.useState(null);
  React.useEffect(() => {
    load(panel).then(setFrames, (error) => { setFrames([]); finished(panel, error); });
  }, []);
  React.useEffect(() => { if (frames) finished(panel); }, [frames]);
  return (
    <ui.PanelChrome title={panel.title} description={panel.description} width={w} height={h}>
      {(innerW, innerH) => frames && (
        <Guard onError={(error) => finished(panel, error)}>{draw(panel, frames, innerW, innerH)}</Guard>)}
    </ui.PanelChrome>
  );
}

function Board({ board }) {
  const height = Math.max(...board.panels.map(({ gridPos: { y, h } }) => y + h)) * LINE + GAP;
  return (
    <div style={{ position: 'relative', width, height, background: theme.colors.background.canvas, color: theme.colors.text.primary }}>
      {board.panels.map((panel) => {
        const { x, y, w, h } = panel.gridPos;
        const place = { position: 'absolute', left: GAP + x * COLUMN, top: GAP + y * LINE };
        return panel.type === 'row'
          ? <div key={panel.id} style={{ ...place, fontSize: 16, fontWeight: 500, lineHeight: '30px' }}>&#x2304; {panel.title}</div>
          : <div key={panel.id} style={place}><Panel panel={panel} w={w * COLUMN - GAP} h={h * LINE - GAP} /></div>;
      })}
    </div>
  );
}

fetch(args.get('dashboard'))
  .then((response) => response.json())
  .then(async (board) => {
    await loadMarks(board.annotations?.list ?? []);
    waiting = board.panels.filter(({ type }) => type !== 'row').length;
    createRoot(document.getElementById('root')).render(
      <data.ThemeContext.Provider value={theme}><ui.GlobalStyles /><Board board={board} /></data.ThemeContext.Provider>);
  })
  .catch((error) => { document.title = `error: ${error.message}`; });
