// The four kinds of panel that the dashboards have. Grafana's own kinds are part of its application and in no package;
// what draws in them is (@grafana/ui), and is what draws here. Read of a panel's options is only what changes the picture.
import * as D from '@grafana/data';
import * as S from '@grafana/scenes';
import * as U from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { property } from './registries.js';

const CONTEXT = { eventBus: new D.EventBusSrv(), eventsScope: 'panel', sync: () => D.DashboardCursorSync.Off };
const asIs = (text) => text;

/** Draws the panel, or says so where there is nothing to draw. */
function drawn(Kind) {
  return function Drawn(panel) {
    const theme = U.useTheme2();
    if (!panel.data.series.some((frame) => frame.length > 0)) return <b data-nothing>No data</b>;
    return <Kind {...panel} theme={theme} />;
  };
}

function Lines({ data, options, timeRange, width, height, theme }) {
  return (
    <U.PanelContextProvider value={CONTEXT}>
      <U.TimeSeries
        frames={data.series}
        structureRev={data.structureRev}
        timeRange={timeRange}
        timeZone="utc"
        legend={options.legend}
        {...{ options, width, height, theme }}
        replaceVariables={asIs}
      >
        {() => null}
      </U.TimeSeries>
    </U.PanelContextProvider>
  );
}

/** The values to show of the panel's series: of each its last. */
function valuesOf({ data, options, fieldConfig, replaceVariables, theme }) {
  return D.getFieldDisplayValues({
    data: data.series,
    reduceOptions: options.reduceOptions,
    sparkline: options.graphMode === U.BigValueGraphMode.Area,
    timeZone: 'utc',
    ...{ fieldConfig, replaceVariables, theme },
  });
}

function Numbers(panel) {
  const { options, width, height, theme } = panel;
  return (
    <U.VizRepeater
      source={panel.data}
      getValues={() => valuesOf(panel)}
      renderCounter={0}
      orientation={D.VizOrientation.Auto}
      {...{ width, height }}
      renderValue={({ value, width, height }) => (
        <U.BigValue
          value={value.display}
          sparkline={value.sparkline}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          textMode={options.textMode}
          {...{ width, height, theme }}
        />
      )}
    />
  );
}

function Bars(panel) {
  const { options, width, height, theme } = panel;
  return (
    <U.VizRepeater
      source={panel.data}
      getValues={() => valuesOf(panel)}
      renderCounter={0}
      orientation={D.VizOrientation.Horizontal}
      itemSpacing={8}
      minVizHeight={options.minVizHeight}
      maxVizHeight={options.maxVizHeight}
      {...{ width, height }}
      getAlignmentFactors={D.getDisplayValueAlignmentFactors}
      renderValue={({ value, width, height, alignmentFactors }) => (
        <U.BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          orientation={D.VizOrientation.Horizontal}
          displayMode={options.displayMode}
          namePlacement={options.namePlacement}
          text={options.text}
          {...{ width, height, theme, alignmentFactors }}
        />
      )}
    />
  );
}

function Rows({ data, options, width, height }) {
  D.cacheFieldDisplayNames(data.series);
  return (
    <TableNG
      data={data.series[0]}
      sortBy={options.sortBy}
      structureRev={data.structureRev}
      getActions={() => []}
      {...{ width, height }}
    />
  );
}

const KINDS = {
  timeseries: [Lines, ['lineWidth', 'fillOpacity', 'showPoints', 'stacking', 'drawStyle', 'axisPlacement']],
  stat: [Numbers, []],
  bargauge: [Bars, []],
  table: [Rows, ['cellOptions', 'align', 'width', 'minWidth']],
};

export function registerPanels() {
  for (const [pluginId, [Kind, paths]] of Object.entries(KINDS)) {
    const plugin = new D.PanelPlugin(drawn(Kind));
    const useCustomConfig = (builder) => paths.forEach((path) => builder.addCustomEditor(property(path)));
    plugin.useFieldConfig({ useCustomConfig });
    S.sceneUtils.registerRuntimePanelPlugin({ pluginId, plugin });
  }
}
