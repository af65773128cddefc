// A Grafana dashboard, drawn by Grafana's own components of what Prometheus answered its queries.
import {
  applyFieldOverrides,
  createTheme,
  type DataFrame,
  dateTime,
  type Field,
  FieldColorModeId,
  FieldConfigOptionsRegistry,
  type FieldConfigPropertyItem,
  type FieldConfigSource,
  FieldType,
  getDisplayProcessor,
  identityOverrideProcessor,
  reduceField,
  ReducerID,
  ThemeContext,
  type TimeRange,
} from '@grafana/data';
import type { VizLegendOptions } from '@grafana/schema';
import { BigValue, GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';
import '@fontsource/inter/latin-400.css';
import '@fontsource/inter/latin-500.css';
import type { ComponentProps } from 'react';
import { createRoot } from 'react-dom/client';

interface Panel {
  id: number;
  type: 'row' | 'stat' | 'timeseries';
  title: string;
  gridPos: { x: number; y: number; w: number; h: number };
  fieldConfig: FieldConfigSource;
  options: { legend: VizLegendOptions } & Pick<ComponentProps<typeof BigValue>, 'colorMode' | 'graphMode' | 'textMode' | 'text'>;
  targets: Array<{ refId: string; expr: string; legendFormat: string }>;
}

interface Series {
  metric: Record<string, string>;
  values: Array<[number, string]>;
}

declare global {
  interface Window {
    dashboard: { title: string; panels: Panel[]; templating: { list: Array<{ name: string; current?: { text: string } }> } };
    found: { start: number; end: number; step_s: number; answers: Record<string, Series[]> };
    drawn: boolean;
  }
}

const { dashboard, found } = window;
const theme = createTheme({ colors: { mode: 'dark' } });
const range: TimeRange = (() => {
  const [from, to] = [found.start, found.end].map((s) => dateTime(s * 1000));
  return { from, to, raw: { from, to } };
})();

// Grafana's grid: 24 columns, rows of 30 pixels, 8 pixels between.
const [COLUMNS, ROW, GAP, PADDING] = [24, 30, 8, 16];
const CELL = (window.innerWidth - 2 * PADDING + GAP) / COLUMNS;

// The options that the panels' plugins register with a server.
const DEFAULTS: Record<string, unknown> = { color: { mode: FieldColorModeId.PaletteClassic } };
const STANDARD = ['unit', 'min', 'max', 'noValue', 'color', 'thresholds'];
const CUSTOM = ['drawStyle', 'lineWidth', 'fillOpacity', 'showPoints', 'pointSize', 'stacking', 'spanNulls', 'scaleDistribution'];
const registry = new FieldConfigOptionsRegistry(() =>
  [...STANDARD, ...CUSTOM].map((path) => {
    const isCustom = CUSTOM.includes(path);
    const item = { id: isCustom ? `custom.${path}` : path, path, name: path, isCustom };
    return { ...item, process: identityOverrideProcessor, shouldApply: () => true } as unknown as FieldConfigPropertyItem;
  })
);

/** A series as Prometheus' data source makes it. */
function frameOf(series: Series, refId: string, legend: string): DataFrame {
  const name = legend.replace(/\{\{(\w+)\}\}/g, (_, label) => series.metric[label] ?? '');
  const time = { name: 'Time', type: FieldType.time, config: { interval: found.step_s * 1000 } };
  const value = { name: 'Value', type: FieldType.number, config: { displayNameFromDS: name }, labels: series.metric };
  return {
    refId,
    name,
    length: series.values.length,
    fields: [
      { ...time, values: series.values.map(([at]) => at * 1000) },
      { ...value, values: series.values.map(([, text]) => (Number.isFinite(Number(text)) ? Number(text) : null)) },
    ],
  };
}

/** What a panel shows, with its units, colours and thresholds. */
function framesOf({ targets, fieldConfig, type }: Panel): DataFrame[] {
  const data = targets.flatMap(({ expr, refId, legendFormat }) =>
    found.answers[expr].map((series) => frameOf(series, refId, legendFormat))
  );
  const defaults = type === 'stat' ? fieldConfig.defaults : { ...DEFAULTS, ...fieldConfig.defaults };
  return applyFieldOverrides({
    data: data.filter((frame) => frame.fields[1].values.some((value) => value !== null)),
    fieldConfig: { ...fieldConfig, defaults },
    fieldConfigRegistry: registry,
    replaceVariables: (text) => text,
    theme,
    timeZone: 'utc',
  });
}

interface Inner {
  panel: Panel;
  width: number;
  height: number;
}

function Graph({ panel, width, height }: Inner) {
  const { legend } = panel.options;
  return (
    <TimeSeries
      frames={framesOf(panel)}
      timeRange={range}
      timeZone="utc"
      legend={{ ...legend, calcs: legend.calcs ?? [] }}
      width={width}
      height={height}
    />
  );
}

function Stat({ panel, width, height }: Inner) {
  const [time, field]: Field[] = framesOf(panel)[0].fields;
  const last = reduceField({ field, reducers: [ReducerID.lastNotNull] })[ReducerID.lastNotNull];
  const display = field.display ?? getDisplayProcessor({ field, theme });
  return (
    <BigValue
      value={display(last)}
      sparkline={{ x: time, y: field }}
      colorMode={panel.options.colorMode}
      graphMode={panel.options.graphMode}
      textMode={panel.options.textMode}
      text={panel.options.text}
      theme={theme}
      width={width}
      height={height}
    />
  );
}

function Placed({ panel }: { panel: Panel }) {
  const { x, y, w, h } = panel.gridPos;
  const [width, height] = [w * CELL - GAP, h * (ROW + GAP) - GAP];
  const place = { position: 'absolute', left: x * CELL, top: y * (ROW + GAP), width, height } as const;
  if (panel.type === 'row') {
    return <div style={{ ...place, ...theme.typography.h5, lineHeight: `${height}px` }}>{panel.title}</div>;
  }
  const Body = panel.type === 'stat' ? Stat : Graph;
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={width} height={height}>
        {(inner, innerHeight) =>
          framesOf(panel).length > 0 ? (
            <Body panel={panel} width={inner} height={innerHeight} />
          ) : (
            <p className="empty">{panel.fieldConfig.defaults.noValue ?? 'No data'}</p>
          )
        }
      </PanelChrome>
    </div>
  );
}

function Page() {
  const { title, templating, panels } = dashboard;
  const bottom = Math.max(...panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  const chosen = templating.list.filter((v) => v.current).map((v) => `${v.name}: ${v.current?.text}`);
  const shown = [range.from, range.to].map((at) => at.utc().format('YYYY-MM-DD HH:mm:ss')).join(' to ');
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ padding: PADDING, background: theme.colors.background.canvas }}>
        <header style={{ display: 'flex', gap: 24, paddingBottom: GAP, alignItems: 'baseline', color: theme.colors.text.secondary }}>
          <span style={{ ...theme.typography.h3, color: theme.colors.text.primary }}>{title}</span>
          <span>{chosen.join('   ')}</span>
          <span style={{ marginLeft: 'auto' }}>{shown} UTC</span>
        </header>
        <main style={{ position: 'relative', height: bottom * (ROW + GAP) }}>
          {panels.map((panel) => (
            <Placed key={panel.id} panel={panel} />
          ))}
        </main>
      </div>
    </ThemeContext.Provider>
  );
}

void draw();

async function draw() {
  await Promise.all(['400', '500'].map((weight) => document.fonts.load(`${weight} 12px Inter`)));
  createRoot(document.getElementById('root')!).render(<Page />);
  const graphs = dashboard.panels.filter(({ type }) => type === 'timeseries').length;
  const look = () => {
    window.drawn = document.querySelectorAll('canvas, .empty').length >= graphs;
    setTimeout(look, 500);
  };
  setTimeout(look, 2000);
}
