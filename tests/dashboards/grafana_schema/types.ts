// The shape of a dashboard's JSON by Grafana's own types, with panels by their kind. Everything is exact: a key that
// Grafana does not know, or a value of another type, is an error.
import type { Dashboard, FieldConfig, Panel, RowPanel } from '@grafana/schema/dist/esm/raw/dashboard/x/Dashboard_types.gen';
import type * as Bars from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as Stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as Table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as Lines from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type { DataQuery, DataSourceRef } from '@grafana/schema';

// In JSON an enum is the text or number that it stands for.
type Plain<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends Array<infer Item>
      ? Array<Plain<Item>>
      : T extends object
        ? { [Key in keyof T]: Plain<T[Key]> }
        : T;

// Of the Prometheus data source, whose types Grafana publishes in no package of their own.
interface Query extends DataQuery {
  expr: string;
  legendFormat?: string;
  instant?: boolean;
  range?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
  datasource?: DataSourceRef;
}

interface Of<Kind extends string, Options, Custom> extends Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> {
  type: Kind;
  targets: Query[];
  options?: Partial<Options>;
  fieldConfig: {
    defaults: Omit<FieldConfig, 'custom'> & { custom?: Partial<Custom> };
    overrides: Array<{
      matcher: { id: string; options?: unknown };
      properties: Array<{ id: string; value?: unknown }>;
    }>;
  };
}

type AnyPanel =
  | Of<'timeseries', Lines.Options, Lines.FieldConfig>
  | Of<'stat', Stat.Options, Record<string, never>>
  | Of<'bargauge', Bars.Options, Record<string, never>>
  | Of<'table', Table.Options, Table.FieldConfig>
  | RowPanel;

interface Annotation {
  name: string;
  enable: boolean;
  hide?: boolean;
  builtIn?: number;
  iconColor: string;
  placement?: 'inControlsMenu';
  datasource: DataSourceRef;
  target: Query;
  // What the Prometheus data source reads besides.
  expr: string;
  step?: string;
  titleFormat: string;
  textFormat: string;
  tagKeys?: string;
  useValueForTime?: boolean;
}

export type Exact = Plain<
  Omit<Dashboard, 'panels' | 'annotations'> & { panels: AnyPanel[]; annotations: { list: Annotation[] } }
>;
