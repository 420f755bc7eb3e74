// What Grafana's own application registers before it draws the first panel, and its packages on npm leave out:
// the properties of a field that a panel may set, and the transformations.
import * as D from '@grafana/data';

const PROPERTIES = {
  displayName: [D.displayNameOverrideProcessor, { expandTemplateVars: true }],
  unit: [D.unitOverrideProcessor],
  min: [D.numberOverrideProcessor],
  max: [D.numberOverrideProcessor],
  decimals: [D.numberOverrideProcessor],
  noValue: [D.displayNameOverrideProcessor],
  color: [D.identityOverrideProcessor],
  thresholds: [D.thresholdsOverrideProcessor],
  mappings: [D.valueMappingsOverrideProcessor],
  links: [D.dataLinksOverrideProcessor],
};
const TRANSFORMATIONS = {
  merge: D.standardTransformers.mergeTransformer,
  organize: D.standardTransformers.organizeFieldsTransformer,
};

/** A property of a field, as a panel's editor would know it; nobody edits here. */
export function property(path, process = D.identityOverrideProcessor, settings = {}) {
  const editor = () => null;
  return { id: path, path, name: path, editor, override: editor, process, settings, shouldApply: () => true };
}

export function fillRegistries() {
  D.standardEditorsRegistry.setInit(() => []);
  D.standardFieldConfigEditorRegistry.setInit(() =>
    Object.entries(PROPERTIES).map(([path, [process, settings]]) => property(path, process, settings)),
  );
  D.standardTransformersRegistry.setInit(() =>
    Object.entries(TRANSFORMATIONS).map(([id, transformation]) => ({
      id,
      name: transformation.name,
      transformation: async () => transformation,
      editor: () => null,
      imageDark: '',
      imageLight: '',
    })),
  );
}
