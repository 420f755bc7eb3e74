// Draws the dashboard in `window.RENDER`: {board, values: {variable: value}, from, to, prometheus}, times in ISO 8601.
// `window.told()` says how far each panel is.
import * as D from '@grafana/data';
import * as R from '@grafana/runtime';
import * as S from '@grafana/scenes';
import * as U from '@grafana/ui';
import { createRoot } from 'react-dom/client';
import { MemoryRouter } from 'react-router-dom';
import { catchError, from, map, of, startWith } from 'rxjs';
import { registerPanels } from './panels.jsx';
import { Prometheus } from './prometheus.js';
import { fillRegistries } from './registries.js';

const SOURCE = { uid: 'eagle-eye', type: 'prometheus' };
const THEME = D.createTheme({ colors: { mode: 'dark' } });

function run(source, request) {
  const told = { series: [], timeRange: request.range };
  return from(source.query(request)).pipe(
    map(({ data, state }) => ({ ...told, series: data, state, request })),
    catchError((error) => of({ ...told, state: D.LoadingState.Error, errors: [{ message: error.message }] })),
    startWith({ ...told, state: D.LoadingState.Loading }),
  );
}

function variable({ type, name, label, query, multi, includeAll, allValue }, values) {
  if (type === 'textbox') return new S.TextBoxVariable({ name, label, value: query });
  const value = multi ? ['$__all'] : values[name];
  const chosen = { isMulti: multi, includeAll, allValue, value, text: multi ? ['All'] : value };
  return new S.QueryVariable({ name, label, datasource: SOURCE, query, ...chosen });
}

function panel({ id, type, title, description, options = {}, fieldConfig, targets, transformations = [], gridPos }) {
  const queries = targets.map((target) => ({ ...target, datasource: SOURCE }));
  const asked = new S.SceneQueryRunner({ datasource: SOURCE, queries });
  const $data = new S.SceneDataTransformer({ $data: asked, transformations });
  const body = new S.VizPanel({ key: `panel-${id}`, pluginId: type, title, description, options, fieldConfig, $data });
  return new S.SceneGridItem({ x: gridPos.x, y: gridPos.y, width: gridPos.w, height: gridPos.h, body });
}

function sceneOf({ board, values, from, to }) {
  const variables = board.templating.list.filter(({ type }) => type !== 'datasource');
  const row = ({ title, gridPos }) => new S.SceneGridRow({ title, y: gridPos.y, children: [] });
  const children = board.panels.map((one) => (one.type === 'row' ? row(one) : panel(one)));
  return new S.EmbeddedScene({
    $timeRange: new S.SceneTimeRange({ from, to, timeZone: 'utc' }),
    $variables: new S.SceneVariableSet({ variables: variables.map((one) => variable(one, values)) }),
    controls: [new S.VariableValueSelectors({}), new S.SceneTimePicker({})],
    body: new S.SceneGridLayout({ isLazy: false, children }),
  });
}

/** How far one panel is: its data's state, how many values, what went wrong. */
function toldOf(found) {
  const { data } = S.sceneGraph.getData(found).state;
  const trouble = [found.state._pluginLoadError, data?.error?.message, ...(data?.errors ?? []).map((one) => one.message)];
  return {
    id: Number(found.state.key.replace('panel-', '')),
    state: data?.state ?? D.LoadingState.NotStarted,
    values: (data?.series ?? []).reduce((sum, frame) => sum + frame.length, 0),
    trouble: trouble.filter(Boolean).join('; '),
  };
}

fillRegistries();
registerPanels();
R.setRunRequest(run);
// There are the panels above and no others.
R.setPluginImportUtils({
  importPanelPlugin: async (id) => Promise.reject(new Error(`no panel is of the kind ${id}`)),
  getPanelPluginFromCache: () => undefined,
});
R.config.theme2 = THEME;
S.sceneUtils.registerRuntimeDataSource({ dataSource: new Prometheus(SOURCE.type, SOURCE.uid) });

const scene = sceneOf(window.RENDER);
window.told = () => S.sceneGraph.findAllObjects(scene, (one) => one instanceof S.VizPanel).map(toldOf);
createRoot(document.getElementById('root')).render(
  <MemoryRouter>
    <D.ThemeContext.Provider value={THEME}>
      <U.GlobalStyles />
      <scene.Component model={scene} />
    </D.ThemeContext.Provider>
  </MemoryRouter>,
);
